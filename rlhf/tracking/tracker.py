"""Tracker: fans the metrics of a step out to metrics.jsonl and to the trackers that `trainer.logger` names."""

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rlhf.config import TrackingConfig, TrainerConfig, WandbConfig
from rlhf.errors import UserError
from rlhf.storage.history_file import HistoryMark
from rlhf.storage.layout import HISTORY
from rlhf.tracking.history import History
from rlhf.tracking.sample_files import GenerationsTable, SampleFiles, ShownSample
from rlhf.tracking.tensorboard import TensorBoard
from rlhf.tracking.wandb import Wandb
from rlhf.tracking.wandb_login import check_login

logger = logging.getLogger(__name__)

# "console" and "jsonl" are verl's names for what is always on here.
ALWAYS_ON = ("console", "jsonl")
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}


class Sink(Protocol):
    """A tracker beside metrics.jsonl. Whatever it raises switches it off."""

    def start(self, history: History) -> None:
        """Begin to write after the last record of `history`; show what is missing of it.

        Called again when the history was cut: closes what is open and goes on as a new process would.
        """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Show one step; steps come in ascending order."""

    def finish(self) -> None:
        """Write what is buffered and close, in bounded time."""


def check_trackers(names: Sequence[str], wandb: WandbConfig) -> None:
    """Refuse a tracker of `trainer.logger` whose package is not installed, and wandb without a login; imports
    neither.

    Raises:
        UserError: naming `trainer.logger`, and the package and how to install it, or the ways to log in.
    """
    for name in names:
        if name in PACKAGES:
            spec = importlib.util.find_spec(PACKAGES[name])
            # A folder named wandb/ in the working directory is a namespace package without an origin.
            if spec is None or spec.origin is None:
                raise UserError(
                    f"trainer.logger={list(names)}: {name} is not installed; "
                    f"run `pip install 'rlhf[{name}]'` or remove it from the list"
                )
    if "wandb" in names:
        check_login(wandb)


class Tracker:
    """The metrics of one run. Only the driver has one.

    Args:
        settings: every setting of the run, for trackers that show them.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        tracking: TrackingConfig,
        settings: Mapping[str, Any],
        run_dir: Path,
        run_id: str,
    ) -> None:
        self.history, self.samples = History(run_dir / HISTORY), SampleFiles(run_dir)
        self._run_id = run_id
        table = GenerationsTable(self.samples, trainer.log_val_generations)
        known: dict[str, Callable[[], Sink]] = {
            "wandb": lambda: Wandb(trainer, tracking.wandb, settings, run_dir, run_id, table),
            "tensorboard": lambda: TensorBoard(run_dir / "tensorboard", table),
        }
        names = [name for name in dict.fromkeys(trainer.logger) if name not in ALWAYS_ON]
        self._sinks = {name: known[name]() for name in names}
        self._last_step = -1

    def start(self, resume_step: int | None, saved: Mapping[str, Any] | None = None) -> None:
        """Bring the history back to `resume_step` (None: a fresh run, empty) and the trackers to the history.

        Called again, it goes on as a new process would, except that a tracker which is off stays off.

        Args:
            saved: `state_dict` at the end of `resume_step`. Where it is of this history, nothing before is read; empty
                for a checkpoint that has none, as one of another tool's.

        Raises:
            UserError: metrics.jsonl is damaged.
            OSError: it can't be written.
        """
        self._last_step = -1 if resume_step is None else resume_step
        forked, mark = False, None
        if resume_step is None:
            mark = HistoryMark(0, "")
        elif saved:
            forked = saved["run_id"] != self._run_id
            mark = HistoryMark(**saved["mark"])
        known = mark is not None and self.history.has(mark)
        self.history.cut_after(self._last_step, mark)
        self.samples.cut_after(self._last_step)
        if not known and not forked and saved != {}:
            self._warn_of_gaps()
        self._each("start", lambda sink: sink.start(self.history))

    def state_dict(self) -> dict[str, Any]:
        """The end of the history, and the run that it is of."""
        return {"run_id": self._run_id, "mark": asdict(self.history.mark())}

    def _warn_of_gaps(self) -> None:
        first = next(self.history.steps(), None)
        if first is None:
            missing: int | str = "all" if self._last_step > 0 else 0
        else:
            missing = self._last_step - first + 1 - sum(1 for _ in self.history.steps())
        if missing:
            logger.warning(
                "%s lacks %s of the steps up to %d that the checkpoint has seen",
                self.history.path,
                missing,
                self._last_step,
            )

    def log(self, step: int, metrics: dict[str, float], samples: Sequence[ShownSample] = ()) -> None:
        """Record one step: first its samples and in metrics.jsonl, where errors propagate, then in the trackers, where
        they don't.

        Raises:
            ValueError: the step is not after the last one; there is one record for each step.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}")
        self.samples.write(step, samples)
        self.history.append({"step": step, **metrics})
        self._last_step = step
        self._each("log", lambda sink: sink.log(step, metrics))

    def finish(self) -> None:
        """Close the trackers; the history needs none of it."""
        self._each("finish", lambda sink: sink.finish())
        self._sinks.clear()

    def _each(self, action: str, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # any failure of a tracker, of whatever kind, must leave the training alone
                del self._sinks[name]
                kind = type(error).__name__
                logger.error("%s failed to %s and is off, training goes on: %s: %s", name, action, kind, error)
                logger.debug("%s failed to %s", name, action, exc_info=True)
