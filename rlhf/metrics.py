"""Figures of one step over all ranks, from what each rank saw."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rlhf.batch import Batch
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.reward import RewardResult


@dataclass(frozen=True)
class Summary:
    """Count, sum, sum of squares and extremes of some values: enough to merge ranks, in the same order everywhere."""

    count: int
    total: float
    squares: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Summary":
        """Summary of `values`; an empty one merges as nothing."""
        numbers = list(values)
        return cls(
            len(numbers),
            sum(numbers),
            sum(v * v for v in numbers),
            min(numbers, default=math.inf),
            max(numbers, default=-math.inf),
        )

    def __add__(self, other: "Summary") -> "Summary":
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Summary(self.count + other.count, self.total + other.total, self.squares + other.squares, low, high)

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2))


def merge(mine: dict[str, Summary], coordinator: Coordinator) -> dict[str, Summary]:
    """The summaries of all ranks added up by name; a name that only some ranks have counts for those. Collective."""
    merged: dict[str, Summary] = {}
    for part in coordinator.gather(mine):
        for name, summary in part.items():
            merged[name] = merged[name] + summary if name in merged else summary
    return {name: merged[name] for name in sorted(merged) if merged[name].count}


def step_metrics(
    batch: Batch, results: list[RewardResult], max_response_length: int, coordinator: Coordinator
) -> tuple[dict[str, float], int]:
    """Reward and length metrics of a step over all ranks, and the step's prompt and response tokens. Collective."""
    responses, prompts = batch.response_lengths.tolist(), batch.prompt_lengths.tolist()
    mine = {
        "reward": Summary.of(batch.scores.tolist()),
        "response_length": Summary.of(responses),
        "prompt_length": Summary.of(prompts),
        "clipped": Summary.of(float(n >= max_response_length) for n in responses),
        "timed_out": Summary.of(float(r.timed_out) for r in results),
    }
    for name in {name for result in results for name in result.extra}:
        mine[f"reward/{name}"] = Summary.of(result.extra[name] for result in results if name in result.extra)
    every = merge(mine, coordinator)
    reward, response, prompt = every["reward"], every["response_length"], every["prompt_length"]
    metrics = {
        "reward/mean": reward.mean,
        "reward/std": reward.std,
        "reward/timeouts": every["timed_out"].total,
        "response_length/mean": response.mean,
        "response_length/min": response.low,
        "response_length/max": response.high,
        "response_length/clip_ratio": every["clipped"].mean,
        "prompt_length/mean": prompt.mean,
    }
    metrics |= {name: summary.mean for name, summary in every.items() if name.startswith("reward/")}
    return metrics, int(response.total + prompt.total)
