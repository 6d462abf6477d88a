"""Computes validation metrics by data source and variable: mean@N, pass@k, best@k, worst@k, maj@k (verl's names).

`best@k/mean`, `worst@k/mean` and `maj@k/mean` equal verl's numbers: means over 1000 draws. Each draw
takes k of a prompt's N responses, with replacement. Generator and seed are verl 0.9's
(`verl/trainer/ppo/metric_utils.py`), so every run and machine gives the same numbers. `best@k` is biased low, because
draws repeat responses; `pass@k` is unbiased.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from rlhf.experience.metrics import Summary, merge
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import RewardResult

DRAWS, SEED = 1000, 42
"""Draws and seed of verl's bootstrap."""
CORE = ("mean@", "pass@", "best@", "maj@")
"""These metrics of a source's main variable are `val-core` if the number after the @ is N. All others are `val-aux`."""


@dataclass(frozen=True)
class AnsweredPrompt:
    """The scored responses to one held-out prompt."""

    data_source: str
    results: Sequence[RewardResult]
    answers: Sequence[str | None]
    """Each response's final answer, or None if unknown."""


def accuracy_of(result: RewardResult) -> float | None:
    """Return 1 for a right response, 0 for a wrong response, and None if the accuracy is unknown.

    The accuracy is the `acc` that a reward function returned (verl's name), or else the first function's score. Any
    number but 0 and 1 counts as unknown.
    """
    value = float(result.extra.get("acc", next(iter(result.terms.values()))))
    return value if value in (0.0, 1.0) else None


def is_right(result: RewardResult) -> bool:
    """Return whether a reward function returned `acc` = 1. Without `acc`, the first score must be at least 1."""
    return result.extra["acc"] == 1 if "acc" in result.extra else result.correct


def validation_metrics(prompts: Sequence[AnsweredPrompt], n: int, coordinator: Coordinator) -> dict[str, float]:
    """Return `val-core/SOURCE/VARIABLE/METRIC` and `val-aux/...` over the prompts of all ranks. Collective.

    A metric is the mean over the prompts of its source. Variables are `reward` (the total reward), `reward/LABEL` (a
    function's own score), each further number that a function returns, and `acc` if each response of the source has an
    accuracy (`accuracy_of`). The source's main variable is `acc` if it exists, else `reward`. Each of this rank's
    `prompts` has `n` responses.
    """
    own: dict[tuple[str, ...], Summary] = {}
    for prompt in prompts:
        for variable, metric, value in _metrics(prompt):
            key = (prompt.data_source, variable, metric)
            own[key] = own.get(key, Summary.of(())) + Summary.of([value])
    merged = merge(own, coordinator)
    metrics = {}
    for (source, variable, metric), summary in merged.items():
        whole, right = merged[source, "reward", f"mean@{n}"], merged.get((source, "acc", f"mean@{n}"))
        has_accuracy = right is not None and right.count == whole.count
        if variable == "acc" and not has_accuracy:
            continue
        main = variable == ("acc" if has_accuracy else "reward")
        is_core = main and metric.startswith(CORE) and metric.removesuffix("/mean").endswith(f"@{n}")
        metrics[f"val-{'core' if is_core else 'aux'}/{source}/{variable}/{metric}"] = summary.mean
    return metrics


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k responses is right, if `correct` of n are.

    Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1.
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def _metrics(prompt: AnsweredPrompt) -> Iterator[tuple[str, str, float]]:
    """Yield variable, metric and value."""
    n = len(prompt.results)
    variables = dict(_variables(prompt.results))
    for name, values in variables.items():
        yield name, f"mean@{n}", statistics.fmean(values)
        if n > 1:
            yield name, f"std@{n}", float(np.std(values))
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(prompt.answers))}
    stated = tuple(numbers[answer] for answer in prompt.answers)
    for k in _sizes(n):
        for name, values in variables.items():
            best, worst = _best_and_worst(tuple(values), k)
            yield name, f"best@{k}/mean", best
            yield name, f"worst@{k}/mean", worst
            if None not in numbers:
                yield name, f"maj@{k}/mean", float(np.array(values)[_voted(stated, k)].mean())
            if name == "acc":
                yield name, f"pass@{k}", pass_at_k(n, int(sum(values)), k)


def _variables(results: Sequence[RewardResult]) -> Iterator[tuple[str, list[float]]]:
    """Yield the name and values of each number that all results have."""
    for name in results[0].extra.keys() - {"acc", "reward"}:
        if all(name in result.extra for result in results):
            yield name, [float(result.extra[name]) for result in results]
    for label in results[0].terms:
        if all(label in result.terms for result in results):
            yield f"reward/{label}", [result.terms[label] for result in results]
    yield "reward", [result.score for result in results]
    right = [value for result in results if (value := accuracy_of(result)) is not None]
    if len(right) == len(results):
        yield "acc", right


def _sizes(n: int) -> list[int]:
    """Return the values of k that verl uses: the powers of two below n, and n; none for one response."""
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] if n > 1 else []


@cache
def _draws(n: int, k: int) -> np.ndarray:
    """Return the indices of the drawn responses, [DRAWS, k] int64."""
    return np.random.RandomState(SEED).choice(n, size=(DRAWS, k), replace=True)


# Cache the results, because many variables and prompts have the same few zeros and ones.
@lru_cache(maxsize=4096)
def _best_and_worst(values: tuple[float, ...], k: int) -> tuple[float, float]:
    """Return the mean of the largest and the mean of the smallest value of a draw, over all draws."""
    drawn = np.array(values)[_draws(len(values), k)]
    return float(drawn.max(axis=1).mean()), float(drawn.min(axis=1).mean())


@lru_cache(maxsize=256)
def _voted(answers: tuple[int, ...], k: int) -> np.ndarray:
    """Return the index of each draw's first response with the majority answer, [DRAWS] int64.

    The first answer wins a tie.
    """
    drawn = _draws(len(answers), k)
    stated = np.array(answers)[drawn]
    supporters = (stated[:, :, None] == stated[:, None, :]).sum(axis=2)
    return drawn[np.arange(DRAWS), supporters.argmax(axis=1)]
