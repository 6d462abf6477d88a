"""Finds signs that a run learned nothing, from its metric history alone, so a resumed run has the same findings."""

from collections.abc import Callable

from rlhf.tracking.history import Record

SAMPLES = "see python -m rlhf.samples RUN_DIR"


class _Always:
    """Counts the steps that have a metric, and records whether `holds` was true in all of them."""

    def __init__(self, metric: str, holds: Callable[[Record], bool]) -> None:
        self._metric, self._holds = metric, holds
        self.steps = 0
        self.true = True

    def add(self, record: Record) -> None:
        if self._metric in record:
            self.steps += 1
            self.true = self.true and self._holds(record)

    def __bool__(self) -> bool:
        return self.true and self.steps > 0

    def __str__(self) -> str:
        return f"in {self.steps:,} of {self.steps:,} steps"


class Findings:
    """Collects the findings of a run, record by record."""

    def __init__(self) -> None:
        self._first: Record = {}
        self._failures = self._timeouts = 0
        self._equal_groups = _Always("reward/frac_zero_std", lambda r: r["reward/frac_zero_std"] == 1)
        self._one_reward = _Always("reward/mean", lambda r: r.get("reward/min") == r.get("reward/max") == self._reward)
        self._truncated = _Always("response_length/clip_ratio", lambda r: r["response_length/clip_ratio"] == 1)
        self._rejected = _Always("guards/refused", lambda r: r["guards/refused"] == 1)
        self._no_gradient = _Always("actor/grad_norm", lambda r: r["actor/grad_norm"] == 0)

    def add(self, record: Record) -> None:
        """Add a record. Records come in the order of steps."""
        if "reward/mean" in record:
            self._first = self._first or record
        self._failures += record.get("reward/failures", 0)
        self._timeouts += record.get("reward/timeouts", 0)
        for each in (self._equal_groups, self._one_reward, self._truncated, self._rejected, self._no_gradient):
            each.add(record)

    @property
    def _reward(self) -> float | None:
        return self._first.get("reward/min")

    @property
    def nothing_learned(self) -> bool:
        """Return whether no step of the run could change the policy towards a higher reward."""
        one_reward = self._one_reward and self._reward is not None
        return any((one_reward, self._equal_groups, self._rejected, self._no_gradient))

    def texts(self) -> list[str]:
        """Return a sentence for each finding, the reasons of `nothing_learned` first. Most name a command or a file."""
        found = []
        if self._one_reward and self._reward is not None:
            what = f"the reward never changed: it was {self._reward:g} for each sample {self._one_reward}"
            found.append(f"{what}, so nothing was learned from it; {SAMPLES}")
        elif self._equal_groups:
            found.append(
                f"every group had equal rewards {self._equal_groups}: nothing was learned from comparing samples; "
                f"{SAMPLES}"
            )
        if self._rejected:
            found.append(f"the guards rejected the batch {self._rejected}: the policy did not change; see run.log")
        elif self._no_gradient:
            found.append(f"the gradient was 0 {self._no_gradient}: no reward changed the policy")
        if self._failures or self._timeouts:
            found.append(
                f"reward functions failed {self._failures:,} times and timed out {self._timeouts:,} times; see run.log"
            )
        if self._truncated:
            found.append(
                f"all responses were truncated at data.max_response_length {self._truncated}; {SAMPLES}, or raise "
                "the limit"
            )
        return found
