"""Sums the weighted scores of several reward functions, and records each function's score and failures."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rlhf.config.schema.reward import REWARD_MODEL
from rlhf.errors import UserError
from rlhf.reward.failures import FailurePolicy, Timeouts
from rlhf.reward.scores import RewardError, RewardItem, RewardResult, Score, Scorer
from rlhf.reward.settings import RESERVED


@dataclass(frozen=True)
class Term:
    label: str
    weight: float
    scorer: Scorer
    policy: FailurePolicy


class Reward:
    """Computes the weighted sum of `terms`. Each term has a label of its own."""

    def __init__(self, terms: Sequence[Term]):
        self._terms = terms
        self._threads = ThreadPoolExecutor(max(1, len(terms)), thread_name_prefix="reward-function")
        # The meaning of each metric reward/<name>. A second meaning of a name is an error.
        self._meanings = dict.fromkeys(RESERVED, "a metric of every run")
        self._meanings |= {term.label: f"the score of {term.label}" for term in terms}

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Return one result for each item, in order.

        Collective with a reward model; ranks may have different numbers of items. Raises RewardError or UserError for
        failures that `reward.on_error` does not forgive.
        """
        # The other functions run in their processes while this thread computes the reward model.
        others = [term for term in self._terms if term.label != REWARD_MODEL]
        started = {term.label: self._threads.submit(term.scorer.score, items) for term in others}
        scores = {term.label: term.scorer.score(items) for term in self._terms if term.label == REWARD_MODEL}
        scores |= {label: future.result() for label, future in started.items()}
        columns = [
            [self._checked(term, given, item) for given, item in zip(scores[term.label], items, strict=True)]
            for term in self._terms
        ]
        if not self._terms:  # only environments give rewards
            return [RewardResult(0.0, {}) for _ in items]
        return [self._sum(row, item) for row, item in zip(zip(*columns, strict=True), items, strict=True)]

    def _checked(self, term: Term, given: Score, item: RewardItem) -> Score:
        meaning = f"a value that {term.label} returns"
        for name in (*given.extra, *given.notes):
            if (other := self._meanings.setdefault(name, meaning)) != meaning:
                raise UserError(
                    f"reward.functions: {term.label} returned {name!r}, but the metric reward/{name} is already "
                    f"{other}. Give it another name."
                )
        if given.score is None or math.isfinite(given.score):
            return given
        return term.policy.failed(RewardError(f"{term.label} returned the score {given.score} for a sample: {item}"))

    def _sum(self, given: Iterable[Score], item: RewardItem) -> RewardResult:
        row = list(given)
        if all(score.score is None for score in row):
            labels = ", ".join(term.label for term in self._terms)
            nothing = RewardError(f"None of {labels} returned a score for a sample: {item}")
            row[0] = replace(row[0], score=self._terms[0].policy.failed(nothing).score, failed=True)
        pairs = zip(self._terms, row, strict=True)
        scores = [(term, score.score) for term, score in pairs if score.score is not None]
        return RewardResult(
            score=sum(term.weight * score for term, score in scores),
            terms={term.label: score for term, score in scores},
            extra={name: number for given in row for name, number in given.extra.items()},
            notes={name: note for given in row for name, note in given.notes.items()},
            timeouts=sum(given.timed_out for given in row),
            failures=sum(given.failed for given in row),
        )

    @property
    def in_background(self) -> bool:
        """Whether another thread may score samples: no function is a reward model, whose calls are collective."""
        return bool(self._terms) and all(term.label != REWARD_MODEL for term in self._terms)

    @property
    def stops(self) -> bool:
        """Whether failures end the run (`reward.on_error=stop`)."""
        return bool(self._terms) and self._terms[0].policy.stops

    @property
    def last_failures(self) -> list[str]:
        """The last failure or timeout of each function that had one."""
        return [term.policy.last for term in self._terms if term.policy.last]

    def pop_timeouts(self) -> list[Timeouts]:
        """Return the samples that timed out since the last call, by function."""
        return [timeouts for term in self._terms for timeouts in term.policy.pop_timeouts()]

    def close(self) -> None:
        for term in self._terms:
            term.scorer.close()
        self._threads.shutdown(cancel_futures=True)
