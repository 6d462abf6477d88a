"""Opens and finishes a run, in one order for every way of launching it; the training between is the caller's.

The supervisor calls with a coordinator of one process. Ranks that another launcher has started call together. Imports
no torch, and nothing slow before the run lock is held.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict

from rlhf.config import Config
from rlhf.config.compare import ResolvedConfig
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_DONE, UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.lock import run_lock_together, wait_for_ranks
from rlhf.storage.disk_errors import is_unfixable
from rlhf.storage.files import make_dir, replace_durably
from rlhf.storage.layout import RESOLVED, RUN_LOG, scan, step_of
from rlhf.tracking.run_output import RunOutput

log = logging.getLogger(__name__)


def refuse_another_run(config: Config, coordinator: Coordinator) -> None:
    """Raise UserError if the run directory holds another run, as it lies there; `live` compares again once it is
    prepared. Changes nothing."""
    if config.run_dir.is_dir():  # a new run need not wait for the import
        from rlhf.checkpoint.start.comparison import check_unprepared
        from rlhf.checkpoint.start.run_dir import refuse_earlier

        refuse_earlier(config.run_dir, config.trainer)
        check_unprepared(config.run_dir, config.trainer, ResolvedConfig.of(config), coordinator)


def live(
    config: Config,
    coordinator: Coordinator,
    output: RunOutput,
    train: Callable[[], int],
    locked: Callable[[], None] = lambda: None,
) -> int:
    """Open the run directory, `train` unless the run is finished, and finish the run. Collective.

    Args:
        train: returns an exit code of `rlhf.errors`; the run is finished only after EXIT_DONE.
        locked: called once the run lock is held, before anything else changes; it may raise UserError.

    Returns:
        EXIT_DONE, or what `train` returned.

    Raises:
        UserError: the directory is in use or holds another run; nothing has changed.
        OSError: the directory cannot be written, and the run in it is not finished.
        Unsaved: the run is finished, and `checkpoint.remote` lacks copies.
    """
    left: list[int] = []
    with ExitStack() as held:
        try:
            finished = _open(config, coordinator, output, held, locked)
        except OSError as error:  # the same on every rank
            if not is_unfixable(error) or not _is_finished_anyway(config, coordinator, error):
                raise
            return EXIT_DONE
        if finished is None and (code := train()) != EXIT_DONE:
            return code
        if coordinator.is_leader:
            left = _finish(config, output, finished)
    from rlhf.checkpoint.remote.copies import check_copied

    check_copied(left, config.run_dir, config.checkpoint)
    return EXIT_DONE


def _open(
    config: Config, coordinator: Coordinator, output: RunOutput, held: ExitStack, locked: Callable[[], None]
) -> int | None:
    """Take the locks into `held` and prepare the directory; return the last step of a finished run, else None."""
    run_dir, trainer, resolved = config.run_dir, config.trainer, ResolvedConfig.of(config)
    coordinator.everywhere(lambda: _make(config))
    # Nothing is written before the lock is held: the directory may be a living run's.
    held.enter_context(run_lock_together(run_dir, coordinator))
    # Slow imports, after the lock: a second run is refused at once.
    from rlhf.checkpoint.remote.lease import release_held
    from rlhf.checkpoint.start.domains import find_domains
    from rlhf.checkpoint.start.preparation import finished_step, prepare

    held.callback(release_held)
    locked()
    coordinator.domains = find_domains(run_dir, coordinator)
    coordinator.on_domain_leaders(lambda: wait_for_ranks(run_dir))
    prepare(run_dir, trainer, config.checkpoint, resolved, coordinator)
    output.keep(run_dir / RUN_LOG)  # not before: `prepare` may empty the directory
    finished = finished_step(run_dir, trainer, resolved, coordinator)
    if finished is None:
        coordinator.on_domain_leaders(lambda: replace_durably(run_dir / RESOLVED, to_yaml(config)))
    return finished


def _make(config: Config) -> None:
    try:
        make_dir(config.run_dir)
    except OSError as error:
        raise UserError(
            f"Cannot create the run directory {config.run_dir} ({error.strerror}). "
            "Set trainer.default_local_dir to a writable folder."
        ) from error


def _is_finished_anyway(config: Config, coordinator: Coordinator, problem: OSError) -> bool:
    """Whether the directory, which cannot be written, holds the finished run; the leader logs its report then.
    Collective."""
    from rlhf.checkpoint.start.preparation import finished_unprepared

    step = finished_unprepared(config.run_dir, config.trainer, ResolvedConfig.of(config), coordinator)
    if step is not None and coordinator.is_leader:
        _log_unwritten(config, step, problem)
    return step is not None


def _finish(config: Config, output: RunOutput, finished: int | None) -> list[int]:
    """Finish what this launch has trained, or what an earlier one had `finished`, at that step; return the steps that
    `checkpoint.remote` lacks. A full disk is a line in the log."""
    from rlhf.tracking import write_report

    left: list[int] = []
    try:
        if finished is None:
            output.progress.phase(0, 0, "writing the report")
        else:
            output.end_bar()
            left = _catch_up(config, finished)
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


def _catch_up(config: Config, step: int) -> list[int]:
    """Do what a kill after the last save, or settings of then, kept an earlier launch from; return the steps that
    `checkpoint.remote` lacks."""
    from rlhf.checkpoint.export.finished_export import export_finished
    from rlhf.checkpoint.remote.copies import copy_pending
    from rlhf.checkpoint.state.run_file import read_run_file
    from rlhf.tracking import Tracker

    run_dir = config.run_dir
    log.info(
        "The run in %s is finished at step %d. To continue it, raise trainer.total_training_steps "
        "(or trainer.total_epochs).",
        run_dir,
        step,
    )
    # A kill between the last commit and the trackers' end left them short of the last steps.
    tracker = Tracker(config.trainer, config.tracking, asdict(config), run_dir, read_run_file(run_dir)["run_id"])
    tracker.start(step)
    tracker.finish()
    export_finished(run_dir, config.checkpoint, step)
    return copy_pending(run_dir, config.trainer, config.checkpoint)


def _log_unwritten(config: Config, step: int | None, problem: OSError) -> None:
    from rlhf.checkpoint.export.finished_export import explain_no_export
    from rlhf.tracking import read_report

    run_dir = config.run_dir
    text = read_report(run_dir)
    log.info("The run in %s is finished at step %s. Nothing is written (%s).\n%s", run_dir, step, problem, text)
    if step is not None:
        explain_no_export(run_dir, config.checkpoint, step)
