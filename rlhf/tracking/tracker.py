"""Sends each step's metrics to metrics.jsonl and to the trackers in `trainer.logger`."""

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rlhf.config import TrackingConfig, TrainerConfig
from rlhf.errors import UserError
from rlhf.storage.history_file import HistoryMark
from rlhf.storage.layout import HISTORY
from rlhf.tracking.history import History
from rlhf.tracking.mlflow import Mlflow
from rlhf.tracking.mlflow_run import check_server
from rlhf.tracking.outcome import Outcome
from rlhf.tracking.sample_files import GenerationsTable, SampleFiles, ShownSample
from rlhf.tracking.tensorboard import TensorBoard
from rlhf.tracking.wandb import Wandb
from rlhf.tracking.wandb_login import check_login

logger = logging.getLogger(__name__)

# verl's names for the progress display and metrics.jsonl, which cannot be switched off.
ALWAYS_ON = ("console", "jsonl")
PACKAGES = ("wandb", "tensorboard", "mlflow")


class Sink(Protocol):
    """A tracker beside metrics.jsonl. Any exception switches the tracker off."""

    def start(self, history: History) -> None:
        """Write the records of `history` that the tracker lacks, and get ready for the next step.

        A second call follows a rollback, which has cut the history.
        """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step. Steps ascend."""

    def finish(self, outcome: Outcome) -> None:
        """Flush and close in bounded time."""


def check_trackers(names: Sequence[str], tracking: TrackingConfig) -> None:
    """Check that the packages of `trainer.logger` are installed, and wandb's login and MLflow's server are known.

    Imports none of the packages.

    Raises:
        UserError: a package is missing, or the login or the server's address is missing or invalid.
    """
    for name in names:
        if name in PACKAGES:
            spec = importlib.util.find_spec(name)
            # A folder named wandb/ in the working directory is a namespace package without an origin.
            if spec is None or spec.origin is None:
                raise UserError(
                    f"trainer.logger={list(names)}: {name} is not installed. Run `pip install 'rlhf[{name}]'`, or "
                    f"remove {name} from the list."
                )
    if "wandb" in names:
        check_login(tracking.wandb)
    if "mlflow" in names:
        check_server(tracking.mlflow)


class Tracker:
    """Records the metrics of a run. Of the ranks, only rank 0 has a tracker. Trackers may show the run's `settings`."""

    def __init__(
        self,
        trainer: TrainerConfig,
        tracking: TrackingConfig,
        settings: Mapping[str, Any],
        run_dir: Path,
        run_id: str,
    ) -> None:
        self.run_dir = run_dir
        self.history, self.samples = History(run_dir / HISTORY), SampleFiles(run_dir)
        self._run_id = run_id
        table = GenerationsTable(self.samples, trainer.log_val_generations)
        known: dict[str, Callable[[], Sink]] = {
            "wandb": lambda: Wandb(trainer, tracking.wandb, settings, run_dir, run_id, table),
            "tensorboard": lambda: TensorBoard(run_dir / "tensorboard", table),
            "mlflow": lambda: Mlflow(trainer, tracking.mlflow, settings, run_dir, run_id, table),
        }
        names = [name for name in dict.fromkeys(trainer.logger) if name not in ALWAYS_ON]
        self._sinks = {name: known[name]() for name in names}
        self._last_step, self._samples_fail = -1, False

    def start(self, resume_step: int | None, saved: Mapping[str, Any] | None = None) -> None:
        """Cut the history after `resume_step` (None: a new run, empty) and sync the trackers with the history.

        A second call, after a rollback, starts the trackers again; a tracker that failed stays off.

        Args:
            saved: `state_dict` at the end of `resume_step`; {} for a checkpoint without this state, such as an import.
                If the end of the history in `saved` fits the file, the records before this end are not read.

        Raises:
            UserError: metrics.jsonl is damaged.
            OSError: metrics.jsonl can't be written.
        """
        self._last_step = -1 if resume_step is None else resume_step
        forked, mark = False, None
        if resume_step is None:
            mark = HistoryMark(0, "")
        elif saved:
            forked = saved["run_id"] != self._run_id
            mark = HistoryMark.parse(saved["mark"])
        known = mark is not None and mark.fits(self.history.path)
        self.history.cut_after(self._last_step, mark)
        self._try_samples(lambda: self.samples.cut_after(self._last_step))
        if not known and not forked and saved != {}:
            self._warn_of_gaps()
        self._each("start", lambda sink: sink.start(self.history))

    def _try_samples(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._samples_fail:
                logger.warning("Samples can't be written; the training goes on without samples: %s", error)
            self._samples_fail = True

    def state_dict(self) -> dict[str, Any]:
        """Return the end of the history and the run's id."""
        return {"run_id": self._run_id, "mark": asdict(HistoryMark.at_end(self.history.path))}

    def _warn_of_gaps(self) -> None:
        first = next(self.history.steps(), None)
        if first is None:
            missing: int | str = "all" if self._last_step > 0 else 0
        else:
            missing = self._last_step - first + 1 - sum(1 for _ in self.history.steps())
        if missing:
            logger.warning(
                "%s lacks %s of the records up to step %d, at which the checkpoint was saved",
                self.history.path,
                missing,
                self._last_step,
            )

    def log(self, step: int, metrics: dict[str, float], samples: Sequence[ShownSample] = ()) -> None:
        """Record one step: first samples, then metrics.jsonl, then the trackers.

        Raises:
            ValueError: `step` is not after the last step.
            OSError: metrics.jsonl can't be written. If only the samples can't be written, a warning is logged.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}")
        self._try_samples(lambda: self.samples.write(step, samples))
        self.history.append({"step": step, **metrics})
        self._last_step = step
        self._each("log", lambda sink: sink.log(step, metrics))

    def finish(self, outcome: Outcome = "finished") -> None:
        """Close the trackers, which may show the outcome. The history needs no closing."""
        self._each("finish", lambda sink: sink.finish(outcome))
        self._sinks.clear()

    def _each(self, action: str, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # no failure of a tracker may stop the training
                del self._sinks[name]
                kind = type(error).__name__
                logger.error("%s failed to %s and is off; the training goes on: %s: %s", name, action, kind, error)
                logger.debug("%s failed to %s", name, action, exc_info=True)
