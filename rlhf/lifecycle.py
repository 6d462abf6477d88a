"""Opens, trains and finishes a run, in the same order for every launcher.

The trainer's supervisor calls `run_lifecycle` with a coordinator of one process. Ranks that torchrun or another
launcher started call `run_lifecycle` as a collective. Imports no torch, and nothing slow before the run lock is taken.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import rlhf
from rlhf.config import Config
from rlhf.config.compare import ResolvedConfig
from rlhf.config.resolved import to_yaml
from rlhf.config.secrets import masked
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, Preempted, Unsaved, UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.lock import run_lock_together, wait_for_ranks
from rlhf.ranks.run_events import Kind, record_event
from rlhf.storage.disk_errors import is_unfixable
from rlhf.storage.files import make_dir, replace_durably
from rlhf.storage.layout import RESOLVED, RUN_LOG, scan, step_of
from rlhf.tracking.alerts import has_alerts, sends_alerts
from rlhf.tracking.run_output import RunOutput

log = logging.getLogger(__name__)


def reject_another_run(config: Config, coordinator: Coordinator) -> None:
    """Raise UserError if the run directory belongs to another run, before `run_lifecycle` changes or repairs it."""
    if config.run_dir.is_dir():  # the imports are slow, and a new run does not need them yet
        from rlhf.checkpoint.start.comparison import check_unprepared
        from rlhf.checkpoint.start.run_dir import reject_earlier

        reject_earlier(config.run_dir, config.trainer)
        check_unprepared(config.run_dir, config.trainer, ResolvedConfig.of(config), coordinator)


def run_lifecycle(
    config: Config,
    coordinator: Coordinator,
    output: RunOutput,
    train: Callable[[], int],
    locked: Callable[[], None] = lambda: None,
    *,
    reports: bool = True,
) -> int:
    """Open the run directory, train unless the run is finished, and finish the run. Return the exit code. Collective.

    Args:
        train: trains and returns an exit code of `rlhf.errors`. Only EXIT_DONE means that the run is finished.
        locked: called with the run lock taken, before the directory changes. It may raise UserError.
        reports: whether to record events, send alerts and write a report. False for an evaluation.

    Raises:
        UserError: the directory is in use, cannot be created, or belongs to another run; or `locked` or `train`
            raised it.
        OSError: the directory cannot be written, and the run in it is not finished.
        Unsaved: the run is finished, but `checkpoint.remote` lacks copies; or `train` raised it.
    """
    left: list[int] = []
    with ExitStack() as locks:
        try:
            finished = _open(config, coordinator, output, locks, locked)
        except OSError as error:  # every rank has the same error
            if not is_unfixable(error) or not _is_finished_anyway(config, coordinator, error):
                raise
            return EXIT_DONE
        if reports:
            coordinator.everywhere(lambda: _lease_memory(config, locks, finished))
        if coordinator.is_leader and reports:
            locks.enter_context(sends_alerts(config.tracking.alerts, config.run_dir))
        record = partial(record_event, config.run_dir) if coordinator.is_leader and reports else _unrecorded
        if finished is None:
            alerts = {"alerts": True} if has_alerts(config.tracking.alerts) else {}
            record("started", host=socket.gethostname(), release=rlhf.__version__, **alerts)
            with _recorded_end(record):
                code = train()
            if code == EXIT_CRASHED and coordinator.is_leader and reports and "mlflow" in config.trainer.logger:
                _mark_failed(config)
            if code != EXIT_DONE:
                return code
            record("finished")
        if coordinator.is_leader and reports:
            left = _finish(config, output, finished)
    from rlhf.checkpoint.remote.copies import check_copied

    check_copied(left, config.run_dir, config.trainer, config.checkpoint)
    return EXIT_DONE


def _mark_failed(config: Config) -> None:
    from rlhf.checkpoint.state.run_file import read_run_file
    from rlhf.tracking.mlflow import mark_failed

    mark_failed(config.trainer, config.tracking.mlflow, read_run_file(config.run_dir)["run_id"])


def _unrecorded(kind: Kind, **facts: Any) -> None:
    pass


@contextmanager
def _recorded_end(record: Callable[..., None]) -> Iterator[None]:
    """Record the error that ends the training in this process. The supervisor's `train` records the end itself."""
    try:
        yield
    except (Preempted, Unsaved) as error:
        record("stopped", cause=str(error))
        raise
    except Exception as error:
        record("failed", cause=str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
        raise


def _open(
    config: Config, coordinator: Coordinator, output: RunOutput, locks: ExitStack, locked: Callable[[], None]
) -> int | None:
    """Lock and prepare the run directory. Return the last step if the run is finished, otherwise None."""
    run_dir, trainer, resolved = config.run_dir, config.trainer, ResolvedConfig.of(config)
    coordinator.everywhere(lambda: _make(config))
    # Write nothing before the lock is taken: another process may be training in the directory.
    locks.enter_context(run_lock_together(run_dir, coordinator))
    # These imports are slow. They come after the lock, so that a second start of the run fails at once.
    from rlhf.checkpoint.remote.lease import release_leases
    from rlhf.checkpoint.start.domains import find_domains
    from rlhf.checkpoint.start.preparation import finished_step, prepare

    locks.callback(release_leases)
    locked()
    coordinator.domains = find_domains(run_dir, coordinator)
    coordinator.on_domain_leaders(lambda: wait_for_ranks(run_dir))
    prepare(run_dir, trainer, config.checkpoint, resolved, coordinator)
    output.open_log(run_dir / RUN_LOG)  # not before `prepare`, which may empty the directory
    finished = finished_step(run_dir, trainer, resolved, coordinator)
    if finished is None:
        coordinator.on_domain_leaders(lambda: replace_durably(run_dir / RESOLVED, to_yaml(config)))
    return finished


def _lease_memory(config: Config, locks: ExitStack, finished: int | None) -> None:
    """Lease this machine's folder for snapshots if the run needs one, and remove the folders of dead runs."""
    from rlhf.checkpoint.state.run_file import read_run_file
    from rlhf.ranks.memory_folder import lease, memory_folder, remove_abandoned

    memory, folder = config.checkpoint.memory, None
    if memory.freq and finished is None:
        folder = memory_folder(memory.dir, config.run_dir, read_run_file(config.run_dir)["run_id"])
    remove_abandoned(memory.dir, config.run_dir, folder)
    if folder is not None:
        locks.enter_context(lease(folder))


def _make(config: Config) -> None:
    try:
        make_dir(config.run_dir)
    except OSError as error:
        raise UserError(
            f"Cannot create the run directory {config.run_dir} ({error.strerror}). "
            "Set trainer.default_local_dir to a writable folder."
        ) from error


def _is_finished_anyway(config: Config, coordinator: Coordinator, problem: OSError) -> bool:
    """Return whether a directory that cannot be written contains the finished run. Collective.

    If so, the leader logs the run's report.
    """
    from rlhf.checkpoint.start.comparison import check_unprepared
    from rlhf.checkpoint.start.preparation import finished_step

    arguments = config.run_dir, config.trainer, ResolvedConfig.of(config), coordinator
    step = finished_step(*arguments) if check_unprepared(*arguments) else None
    if step is not None and coordinator.is_leader:
        _log_unwritten(config, step, problem)
    return step is not None


def _finish(config: Config, output: RunOutput, finished: int | None) -> list[int]:
    """Write the report, and return the steps that `checkpoint.remote` lacks. On a full or read-only disk, only log it.

    `finished` is the last step if an earlier launch finished the run, otherwise None. After such a launch, first make
    the copies and exports that it left out.
    """
    from rlhf.tracking import write_report

    left: list[int] = []
    try:
        if finished is None:
            output.progress.phase(0, 0, "writing the report")
        else:
            output.end_bar()
            # Copy first: if an export fails on a full disk, copies are still made and missing copies still reported.
            left = _copy(config, finished)
            _catch_up(config, finished)
        text = write_report(config.run_dir)
    except OSError as error:
        newest = next(iter(scan(config.run_dir)), None)
        if not is_unfixable(error) or newest is None:
            raise
        _log_unwritten(config, step_of(newest), error)
        return left
    output.end_bar()
    log.info("Done.\n%s", text)
    return left


def _copy(config: Config, step: int) -> list[int]:
    """Log that the run is finished at `step`, make missing remote copies, and return the steps that still lack them."""
    from rlhf.checkpoint.remote.copies import copy_pending

    log.info(
        "The run in %s is finished at step %d: nothing is trained, and changed data has no effect. To train "
        "from scratch, set another trainer.experiment_name. To continue the run, raise trainer.total_training_steps "
        "(or trainer.total_epochs).",
        config.run_dir,
        step,
    )
    return copy_pending(config.run_dir, config.trainer, config.checkpoint)


def _catch_up(config: Config, step: int) -> None:
    """Send the last steps to the trackers and make the exports, if an earlier launch was killed after the last save."""
    from rlhf.checkpoint.export.finished_export import export_finished
    from rlhf.checkpoint.state.run_file import read_run_file
    from rlhf.tracking import Tracker

    run_dir = config.run_dir
    tracker = Tracker(config.trainer, config.tracking, masked(config), run_dir, read_run_file(run_dir)["run_id"])
    tracker.start(step)
    tracker.finish()
    export_finished(run_dir, config.checkpoint, step)


def _log_unwritten(config: Config, step: int | None, problem: OSError) -> None:
    from rlhf.checkpoint.export.finished_export import explain_no_export
    from rlhf.tracking import read_report

    run_dir = config.run_dir
    text = read_report(run_dir)
    log.info("The run in %s is finished at step %s. Nothing is written (%s).\n%s", run_dir, step, problem, text)
    if step is not None:
        explain_no_export(run_dir, config.checkpoint, step)
