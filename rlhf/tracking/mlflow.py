"""Logs to an MLflow server: one MLflow run across all restarts, each step once, by a thread that retries."""

import json
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf.config import MlflowConfig, TrainerConfig
from rlhf.storage.layout import HISTORY
from rlhf.tracking.history import History, Record
from rlhf.tracking.history_follower import HistoryFollower
from rlhf.tracking.mlflow_run import MlflowRun, import_client
from rlhf.tracking.outcome import Outcome
from rlhf.tracking.sample_files import GENERATIONS, GenerationsTable, html_table

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"

FIRST_RETRY_S, LONGEST_RETRY_S = 2.0, 60.0
LAST_RETRY_S = 0.5
"""Time between two attempts during `finish`."""
FINISH_TIMEOUT_S, LOST_TIMEOUT_S = 30.0, 2.0
"""Longest waits of `finish`: for a server that answers, and for a server that did not answer the last request."""
SYSTEM_METRICS_S = 10.0
MARK_TIMEOUT_S = 20.0


class Mlflow:
    """Sends the records of metrics.jsonl to the MLflow run of `run_id`.

    The training only wakes a thread, which sends the records that the server lacks. If the server does not answer, the
    thread logs one warning and retries. Before it sends again, the thread asks the server for its newest step.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        config: MlflowConfig,
        settings: Mapping[str, Any],
        run_dir: Path,
        run_id: str,
        table: GenerationsTable,
    ) -> None:
        self._run, self._settings = MlflowRun(trainer, config, settings, run_id), settings
        self._table, self._history = table, History(run_dir / HISTORY)
        self._thread: threading.Thread | None = None
        self._wake, self._closing, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._outcome: Outcome = "finished"
        self._times: dict[int, int] = {}
        """Milliseconds since 1970 at which each unsent step was logged. A repeated request has the same times, so that
        the server ignores the metrics that it already has."""
        self._begun = int(time.time() * 1000)
        """Time for steps of earlier starts. It is before all times of this start, because MLflow sorts by time."""
        self._follower: HistoryFollower | None = None
        self._is_lost = self._warned = self._files_fail = False
        self._system_at = time.monotonic()

    def start(self, history: History) -> None:
        """Start the thread.

        After a rollback the thread goes on: it notices that metrics.jsonl was cut, and sends no step twice.

        Raises:
            Exception: mlflow cannot be imported.
        """
        if self._thread is None:
            import_client()
            self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
            self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Wake the thread, which reads the step from metrics.jsonl."""
        self._times.setdefault(step, int(time.time() * 1000))
        self._wake.set()

    def finish(self, outcome: Outcome = "finished") -> None:
        """Send the remaining steps and the status of the run.

        Raises:
            TimeoutError: the server did not answer in time. The next start sends the rest, even of a finished run.
        """
        if (thread := self._thread) is None:
            return
        self._outcome = outcome
        self._closing.set()
        self._wake.set()
        thread.join(LOST_TIMEOUT_S if self._is_lost else FINISH_TIMEOUT_S)
        if thread.is_alive():
            self._given_up.set()
            last = self._run.last_step
            steps = "all steps" if last < 0 else f"the steps after {last}"
            raise TimeoutError(f"the server lacks {steps} and the run's final status; the next start sends both")

    def _work(self) -> None:
        delay = FIRST_RETRY_S
        while True:
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                self._send_news()
                if closing:
                    self._run.end(self._outcome)
                    return
                self._is_lost, delay = False, FIRST_RETRY_S
            except Exception as error:  # no failure of a tracker may stop the training
                self._lose(error)
                if self._given_up.wait(LAST_RETRY_S if closing else 0):
                    return
                self._closing.wait(0 if closing else delay)
                delay = min(2 * delay, LONGEST_RETRY_S)
                continue
            self._wake.wait(SYSTEM_METRICS_S)

    def _lose(self, error: Exception) -> None:
        self._follower, self._is_lost = None, True
        if not self._warned:
            self._warned = True
            logger.warning(
                "mlflow: the server does not accept the metrics (%s). The training goes on; the steps are sent when "
                "the server answers.",
                _line(error),
            )

    def _send_news(self) -> None:
        """Send the records that the server lacks, and system metrics when they are due."""
        if self._follower is None:
            # Create the follower first: a record that is appended meanwhile is then found twice instead of missed.
            follower = HistoryFollower(self._history.path)
            self._run.connect()
            self._upload(SETTINGS_FILE, json.dumps(self._settings, indent=1, default=str))
            self._send(self._history.records(max(0, self._run.last_step)))
            self._follower = follower
        self._send(self._follower.new())
        if time.monotonic() - self._system_at >= SYSTEM_METRICS_S and not self._closing.is_set():
            self._system_at = time.monotonic()
            try:
                self._run.send_system_metrics()
            except ImportError as error:
                self._system_at = math.inf
                logger.warning("mlflow: no system metrics (%s). Run `pip install 'rlhf[mlflow]'`.", _line(error))

    def _send(self, records: Iterable[Record]) -> None:
        for record in records:
            step = record["step"]
            if step > self._run.last_step and (rows := self._table.of(step)):
                self._upload(f"{GENERATIONS}/step_{step}.html", html_table(self._table.COLUMNS, rows))
            self._run.add(record, self._times.setdefault(step, self._begun))
        self._run.flush()
        for step in [step for step in tuple(self._times) if step <= self._run.last_step]:
            self._times.pop(step, None)

    def _upload(self, name: str, text: str) -> None:
        """Write a file of the run. If the server cannot store files, warn once and go on."""
        if self._files_fail:
            return
        try:
            self._run.upload(name, text)
        except Exception as error:
            self._run.check_alive()  # raises if the server itself is gone
            self._files_fail = True
            logger.warning("mlflow: metrics are uploaded, but settings and samples are not (%s)", _line(error))


def mark_failed(trainer: TrainerConfig, config: MlflowConfig, run_id: str) -> None:
    """Set the final status of a run whose ranks are dead, in at most MARK_TIMEOUT_S. Log a warning on failure."""

    def mark() -> None:
        try:
            MlflowRun(trainer, config, {}, run_id).mark_failed()
        except Exception as error:  # no failure of a tracker may change how a run ends
            logger.warning("mlflow: the run is not marked as failed (%s)", _line(error))

    thread = threading.Thread(target=mark, name="mlflow", daemon=True)
    thread.start()
    thread.join(MARK_TIMEOUT_S)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
