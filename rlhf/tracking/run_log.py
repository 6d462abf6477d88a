"""Passes a run's metrics and samples to the tracker and the progress display on rank 0; other ranks log nothing."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from rlhf.events import announce
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.ranks.run_events import record_event
from rlhf.storage.history_file import HistoryMark
from rlhf.tracking.headline import headline
from rlhf.tracking.outcome import Outcome
from rlhf.tracking.progress import EVALUATED, SHOWN
from rlhf.tracking.sample_files import ROLLOUT, VALIDATION, ShownSample, as_text
from rlhf.tracking.tracker import Tracker

log = logging.getLogger(__name__)


class Measured(Protocol):
    """The outcome of a save or a resume."""

    def metrics(self) -> dict[str, float]:
        """Return the outcome's metrics by name."""


class RunLog:
    """Records metrics and shows progress of a run of at most `total_steps`. Only rank 0 has a `tracker`.

    With `log_samples`, also logs the best and the worst sample of each step's rollouts and evaluation. The saved state
    is the end of the metric history; a resume or a rollback cuts the history there.
    """

    def __init__(
        self, tracker: Tracker | None, progress: ProgressDisplay, total_steps: int, *, log_samples: bool = False
    ) -> None:
        self._tracker, self._progress = tracker, progress
        self._total_steps, self._log_samples = total_steps, log_samples
        self._pending: dict[str, float] = {}
        self._samples: list[ShownSample] = []
        self._started = False
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the end of the history, or {} before `start`, because only `start` cuts the history after a resume."""
        return self._tracker.state_dict() if self._tracker is not None and self._started else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the end of the history at which the next `start` or `rewind` cuts. Raise KeyError or ValueError for an
        invalid state, on every rank: later only rank 0 reads the state, and its error would come too late."""
        if state:
            HistoryMark.parse(state["mark"])
            str(state["run_id"])
        self._saved = state

    def start(self, step: int, *, resumed: bool) -> None:
        """Reset every tracker to the state after `step` steps or, unless the run is `resumed`, to an empty history."""
        if self._tracker is not None:
            self._tracker.start(step if resumed else None, self._saved)
            self._progress.start(step, self._total_steps)
            record_event(self._tracker.run_dir, "training", step=step, total_steps=self._total_steps)
        self._started = True

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step` and continue there, like a resumed run."""
        self._pending, self._samples = {}, []
        self.start(step, resumed=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the step durably and show it; do nothing if `metrics` is empty."""
        if self._tracker is None or not metrics:
            return
        announce("metrics.before")
        self._tracker.log(step, metrics | self._pending, self._samples)
        announce("metrics.after")
        if self._log_samples:
            log_samples(step, self._samples)
        self._pending, self._samples = {}, []
        hidden = EVALUATED - {headline(metrics).metric}
        shown = [name for name, _, _ in SHOWN if name in metrics and name not in hidden]
        self._progress.update(step, {name: metrics[name] for name in shown})

    def show(self, samples: Sequence[ShownSample]) -> None:
        """Add samples to the next record, for users to read."""
        if self._tracker is not None:
            self._samples += samples

    def note(self, result: Measured | None) -> None:
        """Add the metrics of a save or resume to the next step's record: a step is recorded before it is saved."""
        if result is not None:
            self._pending |= result.metrics()

    def close(self, outcome: Outcome = "finished") -> None:
        """Flush the trackers."""
        if self._tracker is not None:
            self._tracker.finish(outcome)


def log_samples(step: int, samples: Sequence[ShownSample]) -> None:
    """Log the best and the worst sample of a step's rollouts and of its evaluation."""
    for split in (ROLLOUT, VALIDATION):
        ranked = sorted((s for s in samples if s["split"] == split), key=lambda sample: sample["score"])
        for sample in ranked[-1:] + ranked[:1] if len(ranked) > 1 else ranked:
            log.info("step %d, %s", step, as_text(sample))
