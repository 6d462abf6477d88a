"""Computes the metrics of a step over all ranks, from each rank's samples and times."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from statistics import median_low
from typing import TypeVar

from rlhf.batch import RolloutBatch, TokenCounts
from rlhf.experience.groups import Group
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import Timeouts


@dataclass(frozen=True)
class Summary:
    """Summarizes values by count, sum, sum of squares and extremes; summaries of ranks can be added."""

    count: int
    total: float
    squares: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Summary":
        """Return the summary of `values`. Adding the summary of no values changes nothing."""
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


Name = TypeVar("Name", str, tuple[str, ...])


def merge(own: dict[Name, Summary], coordinator: Coordinator) -> dict[Name, Summary]:
    """Return the sum of all ranks' summaries by name, added in rank order. Collective.

    Ranks may have different names. Names without values are dropped.
    """
    merged: dict[Name, Summary] = {}
    for part in coordinator.all_gather(own):
        for name, summary in part.items():
            merged[name] = merged[name] + summary if name in merged else summary
    return {name: merged[name] for name in sorted(merged) if merged[name].count}


def slowest(seconds: Sequence[float]) -> dict[str, float]:
    """Return the slowest rank and the ratio of its time to the median; no metrics for one rank, or if the median is 0.

    `seconds` are each rank's working times, without waits for other ranks.
    """
    if len(seconds) == 1 or not (typical := median_low(seconds)):
        return {}
    longest = max(seconds)
    return {"perf/slowest_rank": seconds.index(longest), "perf/slowest_rank_ratio": longest / typical}


@dataclass
class RolloutStats:
    """Counts samples, failures and times of a step's generations on this rank, dropped groups included."""

    scores: list[float] = field(default_factory=list)
    journaled: list[bool] = field(default_factory=list)
    """Whether each sample came from the journal."""
    failed: list[bool] = field(default_factory=list)
    """Whether the reward failed or timed out on each sample that this process generated or read from the journal."""
    timeouts: int = 0
    failures: int = 0
    rollout_seconds: float = 0.0
    reward_seconds: float = 0.0
    turns: list[int] = field(default_factory=list)
    """Turns of the policy in each episode. This and the next three fields leave out failed episodes."""
    rows: list[int] = field(default_factory=list)
    """Rows of each agent's episode."""
    tool_calls: list[int] = field(default_factory=list)
    invalid_calls: list[int] = field(default_factory=list)
    env_failures: list[int] = field(default_factory=list)
    """How often each episode's environment failed, over all attempts."""
    env_failed: list[bool] = field(default_factory=list)
    """Whether each episode failed."""
    slow: list[Timeouts] = field(default_factory=list)
    """Details of the samples that `timeouts` counts, except samples generated before a resume."""

    def add(self, other: "RolloutStats") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def step_metrics(
    batch: RolloutBatch,
    groups: Sequence[Group],
    max_response_length: int,
    coordinator: Coordinator,
    windows: Iterable[int] = (),
) -> tuple[dict[str, float], TokenCounts]:
    """Return reward and length metrics of a batch over all ranks, and its token counts. Collective.

    `windows` are the models' sliding windows, in tokens. For each window, the token counts have `TokenCounts.beyond`.

    The metrics include the mean of each reward function's score, and of each further number that a function returns.
    Response lengths include observations (tokens that a tool or an environment wrote), as in verl. Responses of
    `max_response_length` tokens count as clipped. Lengths are of rows (`Sample.forks`), rewards of samples. Samples
    whose environment failed count in no metric.
    """
    counted = [sample.finish_reason != "failed" for group in groups for sample in group.samples]
    scores = [score for score, counts in zip(batch.scores.tolist(), counted, strict=True) if counts]
    every = [row for group in groups for row in group.rows]
    rows = [(len(ids), response) for ids, response in every if response.finish_reason != "failed"]
    responses = [len(sample) for _, sample in rows]
    own = {
        "reward": Summary.of(scores),
        "response_length": Summary.of(responses),
        "response_length_terminated": Summary.of(len(s) for _, s in rows if s.finish_reason == "stop"),
        "prompt_length": Summary.of(prompt for prompt, _ in rows),
        "written": Summary.of(sample.written for _, sample in rows),
        "length": Summary.of(prompt + len(sample) for prompt, sample in rows),
        **{f"beyond {w}": Summary.of(max(0, prompt + len(sample) - w) for prompt, sample in rows) for w in windows},
        "clipped": Summary.of(float(n >= max_response_length) for n in responses),
        # A group of one sample cannot have a signal.
        "no_signal": Summary.of(not group.has_signal("seq_reward") for group in groups if len(group.samples) > 1),
    }
    results = [result for group in groups for result in group.results]
    numbers = [result.extra | result.terms for result, counts in zip(results, counted, strict=True) if counts]
    for name in {name for of_sample in numbers for name in of_sample}:
        own[f"reward/{name}"] = Summary.of(of_sample[name] for of_sample in numbers if name in of_sample)
    merged = merge(own, coordinator)
    metrics = {name: summary.mean for name, summary in merged.items() if name.startswith("reward/")}
    for name in ("reward", "response_length", "response_length_terminated", "prompt_length"):
        if name in merged:
            summary = merged[name]
            metrics |= {f"{name}/mean": summary.mean, f"{name}/min": summary.low, f"{name}/max": summary.high}
    metrics |= {"reward/std": merged["reward"].std, "response_length/clip_ratio": merged["clipped"].mean}
    if "no_signal" in merged:
        metrics["reward/frac_zero_std"] = merged["no_signal"].mean
    length = merged["length"]
    beyond = {window: int(merged[f"beyond {window}"].squares) for window in windows}
    return metrics, TokenCounts(int(length.total), int(merged["written"].total), int(length.squares), beyond)


def generation_metrics(
    groups: list[Group],
    stats: RolloutStats,
    coordinator: Coordinator,
    *,
    version: int,
    journal_bytes: int | None,
    overlong: bool,
    staleness: bool,
    generated: bool,
) -> dict[str, float]:
    """Return metrics of a step's generations over all ranks; seconds are this rank's own. Collective.

    Args:
        groups, stats: this rank's batch and the statistics of its generations.
        version: training steps of the run so far.
        journal_bytes: bytes that this rank wrote; None on all ranks without a journal.
        overlong, staleness, generated: whether to return `reward/overlong`, `sampling/staleness_*` and
        `sampling/reward_mean`, too. All ranks pass the same values.
    """
    sums: dict[str, list[float]] = {"reward/timeouts": [stats.timeouts], "reward/failures": [stats.failures]}
    sums["perf/journal_bytes"] = [] if journal_bytes is None else [journal_bytes]
    means: dict[str, list[float]] = {"perf/journal_samples": list(stats.journaled)}
    means |= {"env/turns": [float(n) for n in stats.turns], "env/tool_calls": [float(n) for n in stats.tool_calls]}
    means |= {"env/invalid_calls": [float(n) for n in stats.invalid_calls], "env/rows": [float(n) for n in stats.rows]}
    means |= {"env/failed": [float(failed) for failed in stats.env_failed]}
    # Named perf/ and not env/, because it depends on the machine: an attempt at an episode may fail because its process
    # is slow or was killed, and a retry gives the same bits.
    sums["perf/env_failures"] = [float(n) for n in stats.env_failures]
    if overlong:
        means["reward/overlong"] = [penalty for group in groups for penalty in group.penalties]
    if staleness:
        means["sampling/staleness_mean"] = [version - s.version for group in groups for s in group.samples]
    if generated:
        means["sampling/reward_mean"] = stats.scores
    merged = merge({name: Summary.of(values) for name, values in (sums | means).items()}, coordinator)
    metrics = {"timing_s/gen": stats.rollout_seconds, "timing_s/reward": stats.reward_seconds}
    metrics |= {name: summary.total if name in sums else summary.mean for name, summary in merged.items()}
    return metrics | ({"sampling/staleness_max": merged["sampling/staleness_mean"].high} if staleness else {})
