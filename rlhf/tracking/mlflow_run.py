"""Finds or creates the run on an MLflow server, and sends metrics, parameters and files within MLflow's limits."""

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

from rlhf.config import MlflowConfig, TrainerConfig
from rlhf.errors import UserError
from rlhf.tracking.history import Record
from rlhf.tracking.outcome import Outcome

RUN_TAG = "rlhf.run_id"
URI = "MLFLOW_TRACKING_URI"
MOST_METRICS, MOST_PARAMS, LONGEST_NAME, LONGEST_VALUE = 1000, 100, 250, 6000
"""Limits of a request, and of texts (mlflow/utils/validation.py)."""
STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_SYSTEM = "system/"
# A request may take 10 s, and is retried once. Variables that the user has set win.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a trainer sends requests only to the server that the user named
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_ODD = re.compile(r"[^\w\-./ ]", re.ASCII)


def check_server(config: MlflowConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError unless the address of a server is set and valid. Does not import mlflow."""
    name = "tracking.mlflow.tracking_uri" if config.tracking_uri else URI
    uri = config.tracking_uri or environ.get(URI)
    if not uri:
        raise UserError(
            f"trainer.logger=[mlflow]: no server is named. Set tracking.mlflow.tracking_uri=http://HOST:PORT, or {URI}."
        )
    if not re.match(r"https?://[^/]", uri):
        raise UserError(f"{name}={uri}: must be the address of an MLflow server, http://HOST:PORT or https://HOST.")


def import_client() -> Any:
    """Return mlflow's client class, with short time-outs and without MLflow's own log lines."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    return MlflowClient


def metric_name(name: str) -> str:
    """Return a name that MLflow allows; `mean@4` becomes `mean_at_4`, as in verl.

    A name that is cut or has other characters replaced ends with the original name's CRC, so that different names stay
    different.
    """
    allowed = name.replace("@", "_at_")
    clean = _ODD.sub("_", allowed)
    clean = re.sub(r"/{2,}", "/", clean).strip("/")
    clean = re.sub(r"(?<![^/])\.{1,2}(?![^/])", "_", clean) or "_"
    if _ODD.search(allowed) or len(clean) > LONGEST_NAME:
        clean = f"{clean[: LONGEST_NAME - 9]}_{crc32(name.encode()):08x}"
    return clean


def params_of(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each setting with its dotted name. Values that are too long for MLflow are cut."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from ((metric_name(f"{key}.{rest}"), text) for rest, text in params_of(value))
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield metric_name(str(key)), text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


class MlflowRun:
    """Sends to one run on the server. Errors propagate. After an error, call `connect`: it loads the newest steps."""

    def __init__(self, trainer: TrainerConfig, config: MlflowConfig, settings: Mapping[str, Any], run_id: str) -> None:
        self._experiment, self._name = trainer.project_name, trainer.experiment_name
        self._uri, self._settings, self._tag = config.tracking_uri, settings, run_id
        self._client: Any = None
        self._id = ""
        self._newest: dict[str, int] = {}
        """The newest step of each metric on the server. A smaller or equal step is never sent."""
        self._waiting: list[Any] = []
        self._monitor: Any = None
        self.last_step = -1
        """The newest step that the server has in full."""

    def connect(self) -> None:
        """Find or create the run, mark it as running, and load the newest step of each metric.

        The settings of the first start are the run's parameters, because MLflow never changes a parameter.
        """
        from mlflow.entities import Param

        self._waiting = []
        if self._client is None:
            self._client = import_client()(tracking_uri=self._uri)
        run = self._found() or self._client.create_run(
            self._experiment_id(), tags={RUN_TAG: self._tag}, run_name=self._name
        )
        self._id = run.info.run_id
        if run.info.status != "RUNNING":
            self._client.update_run(self._id, status="RUNNING")
        self._newest = {metric.key: metric.step for metric in run.data._metric_objs}
        steps = [step for name, step in self._newest.items() if not name.startswith(_SYSTEM)]
        # The newest step may lack some metrics after a kill, so `add` compares metric by metric.
        self.last_step = max(steps, default=-1) - 1
        new = [Param(*each) for each in params_of(self._settings) if each[0] not in run.data.params]
        for first in range(0, len(new), MOST_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + MOST_PARAMS])

    def _found(self) -> Any:
        by_tag = f"tags.`{RUN_TAG}` = '{self._tag}'"
        order = ["attributes.start_time ASC"]  # two runs exist if an unanswered request created one late
        runs = self._client.search_runs([self._experiment_id()], by_tag, max_results=1, order_by=order)
        return runs[0] if runs else None

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        known = self._client.get_experiment_by_name(self._experiment)
        if known is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except MlflowException:  # another run of a sweep may have created the experiment
                known = self._client.get_experiment_by_name(self._experiment)
                if known is None:
                    raise
        return str(known.experiment_id)

    def add(self, record: Record, time_ms: int) -> None:
        """Add the metrics of a step that the server lacks, and send full requests."""
        from mlflow.entities import Metric

        step = record["step"]
        for name, value in record.items():
            if name != "step" and self._newest.get(metric := metric_name(name), -1) < step:
                self._newest[metric] = step
                self._waiting.append(Metric(metric, float(value), time_ms, step))
                if len(self._waiting) == MOST_METRICS:
                    self.flush(up_to=step - 1)

    def flush(self, up_to: int | None = None) -> None:
        """Send the metrics that wait. `up_to` is the newest complete step among them; None if all are complete."""
        if self._waiting:
            newest = self._waiting[-1].step if up_to is None else up_to
            self._client.log_batch(self._id, metrics=self._waiting)
            self._waiting = []
            self.last_step = max(self.last_step, newest)

    def send_system_metrics(self) -> None:
        """Send the use of processor, memory, disk, network and GPUs, as MLflow measures it."""
        from mlflow.entities import Metric
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        if self._monitor is None:
            # Never start the monitor: its own thread would end at the first failure of the server.
            self._monitor = SystemMetricsMonitor(self._id, tracking_uri=self._uri)
        self._monitor.collect_metrics()
        found = {f"{_SYSTEM}{name}": value for name, value in self._monitor.aggregate_metrics().items()}
        for each in self._monitor.monitors:
            each.clear_metrics()
        step = 1 + max((self._newest.get(name, -1) for name in found), default=-1)
        self._newest |= dict.fromkeys(found, step)
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in found.items()])

    def upload(self, name: str, text: str) -> None:
        """Write a file of the run."""
        self._client.log_text(self._id, text, name)

    def check_alive(self) -> None:
        """Raise the error of the client if the server does not answer."""
        self._client.get_experiment_by_name(self._experiment)

    def mark_failed(self) -> None:
        """Set the status of a run that a dead process left as running. Creates no run."""
        self._client = import_client()(tracking_uri=self._uri)
        if (run := self._found()) is not None and run.info.status == "RUNNING":
            self._id = run.info.run_id
            self.end("failed")

    def end(self, outcome: Outcome) -> None:
        """Set the final status."""
        self._client.set_terminated(self._id, STATUS[outcome])
