"""Scores samples in the rank's own process, where that is safe. This saves the exchange over a pipe."""

from collections.abc import Sequence

from rlhf.reward.pool import ProcessPool
from rlhf.reward.scores import RewardItem, Score, Scorer
from rlhf.reward.verifiers import exact_match, only_compares, reasoning_gym


class ExactMatch(Scorer):
    """Runs `verifiers.exact_match` on every item."""

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        return [exact_match(item) for item in items]


class ReasoningGym:
    """Runs `verifiers.reasoning_gym` in this process, or in `pool` for tasks that compute with the policy's answer."""

    def __init__(self, pool: ProcessPool):
        self._pool = pool
        self._computes: dict[str, bool] = {}

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        pooled = [self._needs_process(item) for item in items]
        from_pool = iter(self._pool.score([item for item, p in zip(items, pooled, strict=True) if p]))
        return [next(from_pool) if p else reasoning_gym(item) for item, p in zip(items, pooled, strict=True)]

    def _needs_process(self, item: RewardItem) -> bool:
        if item.data_source not in self._computes:
            settings = item.extra_info.get("config") or {}
            self._computes[item.data_source] = not only_compares(item.data_source, settings)
        return self._computes[item.data_source]

    def close(self) -> None:
        self._pool.close()
