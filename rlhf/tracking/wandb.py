"""Logs to Weights & Biases, online or offline: one wandb run across all restarts, each step once and in order."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rlhf.config import TrainerConfig, WandbConfig
from rlhf.storage.files import make_dir, rename
from rlhf.tracking.history import History
from rlhf.tracking.outcome import Outcome
from rlhf.tracking.sample_files import GENERATIONS, GenerationsTable, html_table
from rlhf.tracking.wandb_login import NO_LOGIN, mode_of

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30.0
# This time also bounds wandb's own atexit hook, so that an unreachable server can't keep a finished run alive.
FINISH_TIMEOUT_S = 60.0


@dataclass
class Wandb:
    """Writes the wandb run `run_id` in `<run_dir>/wandb`."""

    trainer: TrainerConfig
    config: WandbConfig
    settings: Mapping[str, Any]
    run_dir: Path
    run_id: str
    table: GenerationsTable
    _run: Any = field(default=None, init=False)
    _next_step: int = field(default=0, init=False)

    def start(self, history: History) -> None:
        """Open the wandb run and log the steps of the history that the wandb run lacks.

        Online, the server names its next step. The server may be behind the history (a kill loses wandb's buffer) or
        ahead (the run repeats steps); steps before the server's next step are never sent again. Offline each start
        begins a new file with the whole history and sets earlier files aside. After a rollback a start first finishes
        the open run.

        Raises:
            RuntimeError: no wandb login was found.
            wandb.errors.Error: wandb doesn't start, or the server doesn't answer within INIT_TIMEOUT_S.
        """
        import wandb

        self.finish()
        mode: Any = mode_of(self.config)
        wandb.setup(
            wandb.Settings(
                mode=mode,
                console="off",
                silent=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=True,
                stop_fn=self._on_stop_button,
            )
        )
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError(NO_LOGIN)
        self._set_offline_segments_aside()
        with _without_arguments():
            self._run = wandb.init(
                id=self.run_id,
                # Do not use "must": if the run's first start did not reach the server, wandb must create the run now.
                resume="allow",
                project=self.trainer.project_name,
                name=self.trainer.experiment_name,
                entity=self.config.entity,
                tags=list(self.config.tags),
                dir=str(self.run_dir),
                config=dict(self.settings),
            )
        self._next_step = self._run.starting_step
        for record in history.records(first=self._next_step):
            self.log(record["step"], {name: value for name, value in record.items() if name != "step"})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log one step unless the server already has the step."""
        if step >= self._next_step:
            import wandb

            rows = self.table.of(step)
            # Do not use wandb.Table: a Table is an artifact, which needs requests to the server during the training.
            table = {GENERATIONS: wandb.Html(html_table(self.table.COLUMNS, rows))} if rows else {}
            self._run.log(metrics | table, step=step, commit=True)

    def finish(self, outcome: Outcome = "finished") -> None:
        """Upload the remaining data. `outcome` is ignored: wandb shows every run as finished.

        Raises:
            TimeoutError: the upload exceeded FINISH_TIMEOUT_S; `wandb sync` uploads the rest from the run directory.
        """
        if self._run is not None:
            self._run.finish()

    def _set_offline_segments_aside(self) -> None:
        # `wandb sync <run_dir>/wandb/offline-run-*` must find each step in one file only.
        superseded = self.run_dir / "wandb" / "superseded"
        for segment in sorted((self.run_dir / "wandb").glob(f"offline-run-*-{self.run_id}")):
            make_dir(superseded)
            # wandb names a segment by the second of its start, and a rollback can follow within the same second.
            names = (superseded / f"{segment.name}.{n}" for n in count(1))
            rename(segment, next(name for name in names if not name.exists()))

    @staticmethod
    def _on_stop_button() -> None:
        # wandb would raise KeyboardInterrupt in the main thread, and the supervisor would restart the ranks.
        logger.warning(
            "stop was pressed on the wandb page; to stop the run, send SIGTERM to the command that started it"
        )


@contextmanager
def _without_arguments() -> Iterator[None]:
    """Hide the command line, which wandb would upload. Under torchrun it has the secrets that the user typed."""
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = arguments
