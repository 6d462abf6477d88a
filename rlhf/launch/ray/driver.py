"""Starts a run in a Ray cluster and waits for its end."""

import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.known_settings import SETTINGS
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, UserError
from rlhf.launch.ray.elastic import elastic_trainer, placeable
from rlhf.launch.ray.endings import Endings, RunEnds
from rlhf.launch.ray.growth import Growth
from rlhf.launch.ray.node import NodeJob, run_node
from rlhf.launch.stop_request import StopRequest
from rlhf.planning.device_defaults import server_gpus
from rlhf.ranks.logs import configure_logging
from rlhf.ranks.next_start import changes_to_continue
from rlhf.ranks.parent import LAUNCH

log = logging.getLogger(__name__)
_CONNECT_S = 10.0


def run_on_ray(config: Config, recipes: Sequence[str]) -> int:
    """Run `trainer.nnodes` workers of `trainer.nproc` ranks in a running Ray cluster. Return an exit code.

    Raises:
        UserError: there is no cluster, or a rank found a user's mistake.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    configure_logging(who="ray")
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(config.launcher.start_timeout_s)
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    address = config.launcher.address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host and port.isdigit():
            # If nothing listens there, Ray ends this process instead of raising an error.
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"launcher.address={config.launcher.address}: no Ray cluster answers at {address} ({error}). Run "
            "`ray start --head`, and `ray start --address=HOST:6379` on each other machine; or correct the address."
        ) from error
    try:
        # The folder is for files of Ray's controller, which runs on this machine.
        with tempfile.TemporaryDirectory(prefix="rlhf-ray-") as files, StopRequest() as stop:
            # Run the actor on this machine, so that it survives the loss of another machine.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            resources = _resources(config)
            actor = ray.remote(num_cpus=0, scheduling_strategy=here)(_LeaveRequests)
            requests = actor.remote(config.trainer.nnodes, resources)
            fit = _Fit(_trainer(config, recipes, requests, resources, files))
            fit.start()
            _wait(fit, stop, requests)
            return EXIT_REQUEUE if stop.kill else _code(fit.error, changes_to_continue(config.trainer))
    finally:
        ray.shutdown()


class _LeaveRequests:
    """A Ray actor that decides whether the ranks must save and leave. The workers poll the actor.

    Args:
        most: the largest number of machines.
        resources: what a worker needs of its machine.
    """

    def __init__(self, most: int, resources: Mapping[str, float]) -> None:
        configure_logging(who="ray")
        self._stops = False
        self._growth = Growth(most, lambda: placeable(resources, 1))

    def stop(self) -> None:
        """Record that the driver was asked to stop."""
        self._stops = True

    def look(self, attempt: str, machines: int) -> tuple[bool, bool]:
        """Return whether the run stops, and whether `attempt`, which runs on `machines` machines, restarts on more."""
        return self._stops, not self._stops and self._growth.look(attempt, machines)


class _Fit(threading.Thread):
    """Runs `trainer.fit()` outside the main thread, where Ray would replace the handler of SIGINT."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(daemon=True)
        self._trainer = trainer
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self.error = error


def _resources(config: Config) -> dict[str, float]:
    """Return what a worker needs of its machine."""
    import ray

    t = config.trainer
    uses_gpus = t.device == "cuda" or (t.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    gpus = t.ranks + server_gpus(lambda key: SETTINGS[key].value(config)) if uses_gpus else 0
    return {"CPU": t.ranks, **({"GPU": gpus} if gpus else {})}


def _trainer(config: Config, recipes: Sequence[str], requests: Any, resources: Mapping[str, float], folder: str) -> Any:
    """Return Ray's trainer, whose callback decides about restarts."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    t, launcher = config.trainer, config.launcher
    launch = os.environ.get(LAUNCH) or f"ray-{uuid.uuid4().hex}"
    endings = Endings(t, config.run_dir)
    job = NodeJob(
        config=to_yaml(config),
        recipes=tuple(recipes),
        nproc=t.ranks,
        run_dir=config.run_dir,
        folder=Path.cwd(),
        environment={**os.environ, LAUNCH: launch, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
        grace_s=t.preempt_grace_s,
        changes=changes_to_continue(config.trainer),
        look=lambda attempt, machines: ray.get(requests.look.remote(attempt, machines)),
    )

    class AfterException(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            time.sleep(endings.after(worker_exceptions.values()))

    counts = launcher.node_counts(t.nnodes)
    trainer = DataParallelTrainer if len(counts) == 1 else elastic_trainer
    return trainer(
        train_loop_per_worker=lambda: run_node(job),
        scaling_config=ScalingConfig(
            num_workers=t.nnodes if len(counts) == 1 else (counts[0], t.nnodes),
            use_gpu="GPU" in resources,
            resources_per_worker=dict(resources),
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=launch,
            storage_path=folder,
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=t.max_restarts),
            callbacks=[AfterException()],
        ),
    )


def _wait(fit: _Fit, stop: StopRequest, requests: Any) -> None:
    """Wait until the run ends. Pass a stop request on to the workers; a second stop signal ends the wait."""
    passed_on = False
    while fit.is_alive() and not stop.kill:
        if stop.signal_name is not None and not passed_on:
            passed_on = True
            log.info("%s: the ranks save and leave.", stop.signal_name)
            requests.stop.remote()
        fit.join(0.2)


def _code(error: BaseException | None, changes: str) -> int:
    """Return the exit code of a run that ended with this error of Ray. Raise UserError for a user's mistake.

    `changes`: the result of `changes_to_continue`.
    """
    from ray.train import ControllerError, TrainingFailedError

    if error is None:
        return EXIT_DONE
    end = error.controller_failure if isinstance(error, ControllerError) else error
    if isinstance(end, RunEnds):
        if end.code == EXIT_USER_ERROR:
            raise UserError(end.message)
        log.log(logging.INFO if end.code == EXIT_REQUEUE else logging.ERROR, "%s", end.message)
        return end.code
    if not isinstance(error, TrainingFailedError):
        raise error
    log.error("Ray could not run the job: %s. The same command%s continues the run.", end, changes)
    return EXIT_CRASHED
