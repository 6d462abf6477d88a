"""Collects the curves of a run from its metric history, in 16 bytes of memory per value."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.tracking.history import Record
from rlhf.tracking.source_results import source_results

COLUMNS = 560
"""Pixel columns of a plot. A plot shows the lowest and the highest value of each column."""


@dataclass(frozen=True)
class Panel:
    """One plot: its title, and its curves as pairs of a label and a metric. `share`: whether the axis covers 0 to 1."""

    title: str
    curves: tuple[tuple[str, str], ...]
    unit: str = ""
    share: bool = False


PANELS = (
    Panel("Reward", (("mean", "reward/mean"), ("held-out", "val/reward"))),
    Panel(
        "KL per token",
        (("to the reference", "actor/ref_kl"), ("of one update", "actor/kl"), ("in the reward", "reward/kl")),
    ),
    Panel("Entropy", (("policy", "actor/entropy"),), "nats per token"),
    Panel(
        "Lengths", (("response, mean", "response_length/mean"), ("response, longest", "response_length/max")), "tokens"
    ),
    Panel(
        "Clipped and truncated",
        (
            ("tokens clipped", "actor/pg_clipfrac"),
            ("dual clip", "actor/pg_clipfrac_lower"),
            ("values clipped", "critic/vf_clipfrac"),
            ("responses truncated", "response_length/clip_ratio"),
        ),
        "share",
    ),
    Panel("Groups with equal rewards", (("groups", "reward/frac_zero_std"),), "share"),
    Panel("Gradient norm", (("actor", "actor/grad_norm"), ("critic", "critic/grad_norm"))),
    Panel("Loss", (("policy", "actor/pg_loss"), ("critic", "critic/loss"))),
    Panel("Learning rate", (("actor", "actor/lr"), ("critic", "critic/lr"))),
    Panel("Explained variance", (("critic", "critic/explained_variance"),)),
    Panel("Staleness", (("mean", "sampling/staleness_mean"), ("oldest", "sampling/staleness_max")), "steps"),
    Panel("Trainer against rollout engine", (("log-prob difference", "rollout/logprob_diff_mean"),)),
    Panel("Speed", (("all ranks", "perf/tokens_per_second"),), "tokens per second"),
    Panel(
        "Memory of the largest rank",
        (
            ("host", "perf/host_rss_gb"),
            ("GPU, tensors", "perf/max_memory_allocated_gb"),
            ("GPU, reserved", "perf/max_memory_reserved_gb"),
        ),
        "GiB",
    ),
)
ACCURACY = "Held-out accuracy"
Points = list[tuple[float, float]]


class Curve:
    """Stores the finite values of a metric with their steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: object) -> None:
        """Add a value; skip values that are not finite numbers."""
        if isinstance(value, int | float) and math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)

    def __bool__(self) -> bool:
        return len(self.steps) > 0

    def points(self) -> Points:
        """Return all points or, of a long curve, the first, the last, and each pixel column's lowest and highest."""
        count = len(self.steps)
        if count <= 2 * COLUMNS:
            return list(zip(self.steps, self.values, strict=True))
        first, last = self.steps[0], self.steps[-1]
        width = (last - first + 1) / COLUMNS
        found: Points = []
        start = 0
        while start < count:
            column = int((self.steps[start] - first) / width)
            end = start
            while end < count and int((self.steps[end] - first) / width) == column:
                end += 1
            chosen = range(start, end)
            low, high = min(chosen, key=self.values.__getitem__), max(chosen, key=self.values.__getitem__)
            found += [(self.steps[i], self.values[i]) for i in sorted({low, high} | ({0, count - 1} & set(chosen)))]
            start = end
        return found

    def smoothed(self, over: int) -> "Curve":
        """Return the running mean of the last `over` values."""
        found = Curve()
        for end in range(1, len(self.values) + 1):
            window = self.values[max(0, end - over) : end]
            found.add(self.steps[end - 1], sum(window) / len(window))
        return found


class Curves:
    """Collects all curves of PANELS, and the results of each data source, record by record."""

    def __init__(self) -> None:
        names = {metric for panel in PANELS for _, metric in panel.curves} | {"val/accuracy"}
        self.of: dict[str, Curve] = {name: Curve() for name in names}
        self._evaluations: list[Record] = []

    def add(self, record: Record) -> None:
        """Add a record. Records come in the order of steps."""
        step = record["step"]
        for name, curve in self.of.items():
            if name in record:
                curve.add(step, record[name])
        if any(name.startswith("val-core/") for name in record):
            self._evaluations.append({key: value for key, value in record.items() if key.startswith(("val-", "step"))})

    def accuracies(self) -> dict[str, Curve]:
        """Return the curve of the accuracy on all held-out prompts, and of each data source if there are several."""
        found = {"all prompts": self.of["val/accuracy"]} if self.of["val/accuracy"] else {}
        results = source_results([{k: v for k, v in each.items() if k != "step"} for each in self._evaluations])
        for record, of_sources in zip(self._evaluations, results, strict=True):
            for (source, metric), value in of_sources.items():
                if metric.startswith("mean@"):
                    found.setdefault(f"{source} {metric}", Curve()).add(record["step"], value)
        return found if len(found) > 2 or "all prompts" not in found else {"all prompts": found["all prompts"]}


def sample_rows(steps: Sequence[float], most: int) -> list[int]:
    """Return at most `most` evenly spaced positions, always with the first and the last."""
    count = len(steps)
    return list(range(count)) if count <= most else sorted({i * (count - 1) // (most - 1) for i in range(most)})
