"""Collects samples for users to read: texts and rewards of rollouts and evaluations, from all ranks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.data import Prompt
from rlhf.experience.groups import Group
from rlhf.experience.prompt_share import PromptShare
from rlhf.experience.token_texts import token_texts
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from rlhf.tracking.sample_files import ROLLOUT, VALIDATION, ShownSample

TOKENS = 600
"""Number of a rollout's first tokens to store one by one, for the report."""


@dataclass(frozen=True)
class RolloutViewer:
    """Picks rollouts of each step to show to users, with their texts and advantages."""

    prompts: PromptShare
    tokenizer: PreTrainedTokenizerBase
    count: int
    """Rollouts per step over all ranks; -1 for all."""
    coordinator: Coordinator
    own_prompts: bool = True
    """Whether groups' prompts are the data's tokens. Not with environments, which add tools and the text of `reset`."""

    def shown(self, groups: Sequence[Group], advantages: Sequence[float]) -> list[ShownSample]:
        """Return the picked rollouts of all ranks on the leader, and an empty list on other ranks. Collective.

        Picks the first sample of each prompt, then the second, and so on. `advantages` are the mean advantages of the
        samples of `groups`, this rank's groups.
        """
        count, coordinator = self.count, self.coordinator
        if not count:
            return []
        rows = [(group, number) for group in groups for number in range(len(group.samples))]
        order = sorted(range(len(rows)), key=lambda row: rows[row][1])
        part = _parts(coordinator.all_gather(len(rows)), count)[coordinator.rank] if count > 0 else len(rows)

        def own() -> list[ShownSample]:
            return [self._rollout(*rows[row], advantages[row]) for row in sorted(order[:part])]

        return list(chain.from_iterable(coordinator.collect(own) or []))

    def _rollout(self, group: Group, number: int, advantage: float) -> ShownSample:
        prompt: Prompt | None = self.prompts.prompt(group.uid)
        if prompt is not None and self.own_prompts and prompt.token_ids != group.prompt_ids:
            prompt = None  # the data files have changed since the prompt was drawn
        sample, result = group.samples[number], group.results[number]
        return _shown(
            ROLLOUT, group.prompt_ids, prompt, sample, result, group.scores[number], advantage, self.tokenizer
        )


def shown_answers(
    answered: Sequence[tuple[Prompt, Sequence[Sample]]],
    results: Sequence[Sequence[RewardResult]],
    tokenizer: PreTrainedTokenizerBase,
    coordinator: Coordinator,
) -> list[ShownSample]:
    """Return all samples of an evaluation on the leader, and an empty list on other ranks. Collective."""

    def own() -> list[ShownSample]:
        return [
            _shown(VALIDATION, prompt.token_ids, prompt, sample, result, result.score, None, tokenizer)
            for (prompt, samples), of_prompt in zip(answered, results, strict=True)
            for sample, result in zip(samples, of_prompt, strict=True)
        ]

    gathered = chain.from_iterable(coordinator.collect(own) or [])
    return sorted(gathered, key=lambda sample: (sample["uid"], sample["sample"]))


def _parts(sizes: Sequence[int], count: int) -> list[int]:
    """Split `count` over ranks as evenly as possible. A rank gets at most its number of samples in `sizes`."""
    parts = [0] * len(sizes)
    for _ in range(min(count, sum(sizes))):
        parts[min((part, rank) for rank, part in enumerate(parts) if part < sizes[rank])[1]] += 1
    return parts


def _shown(
    split: str,
    prompt_ids: list[int],
    prompt: Prompt | None,
    sample: Sample,
    result: RewardResult,
    score: float,
    advantage: float | None,
    tokenizer: PreTrainedTokenizerBase,
) -> ShownSample:
    return {
        "split": split,
        "uid": sample.uid,
        "sample": sample.sample,
        "data_source": None if prompt is None else prompt.data_source,
        # Keep the chat template's special tokens, so that users can see a wrong template.
        "prompt": tokenizer.decode(prompt_ids),
        "response": tokenizer.decode(sample.token_ids.tolist()),
        "ground_truth": None if prompt is None else _plain(prompt.ground_truth),
        "score": score,
        "rewards": result.terms,
        "extra": {**result.extra, **result.notes},
        "advantage": advantage,
        "length": len(sample),
        "rows": 1 + len(sample.forks),
        "observations": sample.observations,
        "parts": _parts_of(sample, tokenizer) if sample.observations else None,
        "tokens": _tokens_of(sample, tokenizer) if split == ROLLOUT else None,
        "finish_reason": sample.finish_reason,
        "version": sample.version,
    }


def _parts_of(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """Return the response as successive texts, each with its writer.

    The writer is `policy`, `environment`, or `history`: a history that an agent rewrote, with which a new row begins.
    """
    bounds = [0, *(bound for span in sample.observations for bound in span), len(sample)]
    texts = [str(tokenizer.decode(sample.token_ids[start:end])) for start, end in pairwise(bounds)]
    forks = {start for start, _ in sample.forks}
    writers = cycle(("policy", "environment"))
    return [
        ["history" if start in forks else writer, text]
        for writer, start, text in zip(writers, bounds, texts, strict=False)
        if text
    ]


def _tokens_of(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """Return text and log-prob of each of the first tokens; an environment's token has no log-prob."""
    texts = token_texts(sample.token_ids[:TOKENS].tolist(), tokenizer)
    log_probs: list[float | None] = [round(float(value), 3) for value in sample.log_probs[:TOKENS]]
    for start, end in sample.observations:
        log_probs[start:end] = [None] * len(log_probs[start:end])
    return [[text, log_prob] for text, log_prob in zip(texts, log_probs, strict=True)]


def _plain(value: Any) -> Any:
    """Return a value of the data as JSON types, which ranks can exchange. A date, for example, becomes text."""
    return json.loads(json.dumps(value, default=str))
