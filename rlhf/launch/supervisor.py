"""Supervisor of a run: owns the run directory, starts and restarts the ranks, and takes them with it when it ends.

It holds no training state, so it may be killed at any moment as well. Signals: see `rlhf.launch.stop_request`.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rlhf.config import Config
from rlhf.config.compare import ResolvedConfig
from rlhf.config.redaction import Redaction
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, Unsaved, UserError
from rlhf.launch import evidence
from rlhf.launch.attempt import Attempt
from rlhf.launch.callbacks import Callbacks
from rlhf.launch.hangs import HangDetector
from rlhf.launch.rank_output import RankOutput
from rlhf.launch.rank_starter import RankStarter
from rlhf.launch.restart_policy import GiveUp, RestartPolicy
from rlhf.launch.stop_request import StopRequest
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.lock import run_lock, wait_for_ranks
from rlhf.ranks.logs import configure_logging
from rlhf.ranks.status import RankStatus, clear_statuses, read_statuses
from rlhf.ranks.stop import IDLE
from rlhf.ranks.transport import LoneTransport
from rlhf.storage.disk_errors import is_unfixable
from rlhf.storage.files import make_dir, replace_durably
from rlhf.storage.layout import HISTORY, RESOLVED, RUN_LOG, scan, step_of
from rlhf.tracking.run_output import OutputHandler, RunOutput

NO_CALLBACKS = Callbacks()

log = logging.getLogger(__name__)


def supervise(config: Config, check: Callable[[], None], banner: str = "", callbacks: Callbacks = NO_CALLBACKS) -> int:
    """Run the training to its end and return the exit code of `rlhf.errors`.

    `banner` is said first. `check` raises UserError for what is wrong with the configuration; the imports of the ranks
    begin meanwhile. Raises UserError as well, before anything is changed, when the directory is in use, can't be
    written or holds another run, or the devices don't suffice.
    """
    with RunOutput(config.tracking.progress, Redaction(os.environ)) as output:
        configure_logging(handler=OutputHandler(output))
        if banner:
            output.line(banner)
        output.begin_bar()
        output.progress.phase(0, 0, "starting")
        return _supervise(config, check, output, callbacks)


def _supervise(config: Config, check: Callable[[], None], output: RunOutput, callbacks: Callbacks) -> int:
    expected = not _seems_finished(config)
    with RankOutput(output) as of_ranks, RankStarter(config, output=of_ranks, expected=expected) as starter:
        _compare(config)
        check()
        _make(config.run_dir)
        try:
            with run_lock(config.run_dir):
                try:
                    return _supervise_locked(config, starter, output, callbacks, expected=expected)
                finally:
                    _release_lease()
        except OSError as error:
            if not is_unfixable(error):
                raise
            if _tells_finished(config, error):
                return EXIT_DONE
            raise UserError(
                f"Cannot write into the run directory {config.run_dir}: {error}. Mend it, or set "
                "trainer.default_local_dir to a writable folder with room."
            ) from error


def _compare(config: Config) -> None:
    """Refuse another run than the directory's at once; what `prepare` brings there is compared again."""
    try:
        if config.run_dir.is_dir():  # a new run need not wait for the import
            from rlhf.checkpoint.start.comparison import check_unprepared
            from rlhf.checkpoint.start.run_dir import refuse_earlier

            refuse_earlier(config.run_dir, config.trainer)
            check_unprepared(config.run_dir, config.trainer, ResolvedConfig.of(config), Coordinator(LoneTransport()))
    except OSError as error:
        if not is_unfixable(error):
            raise
        raise UserError(
            f"Cannot read the run directory {config.run_dir}: {error}. Mend it, or set trainer.default_local_dir to a "
            "folder of your own."
        ) from error


def _tells_finished(config: Config, problem: OSError) -> bool:
    """Whether the directory, which cannot be written, holds the finished run; its report is logged then."""
    from rlhf.checkpoint.export.finished_export import explain_no_export
    from rlhf.checkpoint.start.preparation import finished_unprepared
    from rlhf.tracking import read_report

    alone, run_dir = Coordinator(LoneTransport()), config.run_dir
    step = finished_unprepared(run_dir, config.trainer, ResolvedConfig.of(config), alone)
    if step is not None:
        text = read_report(run_dir)
        log.info("The run in %s is finished at step %d. Nothing is written (%s).\n%s", run_dir, step, problem, text)
        explain_no_export(run_dir, config.checkpoint, step)
    return step is not None


def _make(run_dir: Path) -> None:
    try:
        make_dir(run_dir)
    except OSError as error:
        raise UserError(
            f"Cannot create the run directory {run_dir} ({error.strerror}). "
            "Set trainer.default_local_dir to a writable folder."
        ) from error


def _release_lease() -> None:
    from rlhf.checkpoint.remote.lease import release_held

    release_held()


def _seems_finished(config: Config) -> bool:
    """Whether the newest checkpoint is the run's last, by its name; whether it is intact is found out later."""
    try:
        newest = next(iter(scan(config.run_dir)), None)
    except OSError:  # told where the directory is compared
        return False
    t = config.trainer
    return newest is not None and not t.overwrite and step_of(newest) == t.total_training_steps


def _supervise_locked(
    config: Config, starter: RankStarter, output: RunOutput, callbacks: Callbacks, *, expected: bool
) -> int:
    # Slow imports, after the lock: a second run is refused at once.
    from rlhf.checkpoint.export.finished_export import export_finished
    from rlhf.checkpoint.remote.copies import check_copied, copy_pending
    from rlhf.checkpoint.start.preparation import finished_step, prepare
    from rlhf.checkpoint.state.run_file import read_run_file
    from rlhf.tracking import Tracker, write_report

    run_dir = config.run_dir
    if expected:
        starter.check_devices()
    wait_for_ranks(run_dir)
    alone, resolved = Coordinator(LoneTransport()), ResolvedConfig.of(config)
    prepare(run_dir, config.trainer, config.checkpoint, resolved, alone)
    output.keep(run_dir / RUN_LOG)  # not before: it may empty the directory
    step = finished_step(run_dir, config.trainer, resolved, alone)
    if step is not None:
        output.end_bar()
        log.info(
            "The run in %s is finished at step %d. To continue it, raise trainer.total_training_steps "
            "(or trainer.total_epochs).",
            run_dir,
            step,
        )
        # A kill between the last commit and the trackers' end left them short of the last steps.
        run_id = read_run_file(run_dir)["run_id"]
        tracker = Tracker(config.trainer, config.tracking, asdict(config), run_dir, run_id)
        tracker.start(step)
        tracker.finish()
        export_finished(run_dir, config.checkpoint, step)
        left = copy_pending(run_dir, config.trainer, config.checkpoint)
        log.info("Done.\n%s", write_report(run_dir))
        try:
            check_copied(left, run_dir, config.checkpoint)
        except Unsaved as error:
            log.error("%s", error)
            return EXIT_REQUEUE
        return EXIT_DONE
    if not expected:
        starter.check_devices()
    replace_durably(run_dir / RESOLVED, to_yaml(config))
    callbacks.follow(run_dir / HISTORY)
    with StopRequest() as stop:
        code = run_attempts(config, ["-m", "rlhf.worker", str(run_dir)], starter, stop, callbacks)
        callbacks.look(stop)
    if code == EXIT_DONE:
        output.progress.phase(0, 0, "writing the report")
        text = write_report(run_dir)
        output.end_bar()
        log.info("Done.\n%s", text)
    return code


def run_attempts(
    config: Config, command: Sequence[str], starter: RankStarter, stop: StopRequest, callbacks: Callbacks = NO_CALLBACKS
) -> int:
    """Start `python *command` as `trainer.nproc` ranks, again after each crash; returns the exit code of the run."""
    t = config.trainer
    run_dir = config.run_dir
    policy = RestartPolicy(t)
    detector = HangDetector(config) if t.watchdog else None
    while True:
        clear_statuses(run_dir)
        ranks = starter.start(command, stop)
        if ranks is None:
            _log_idle(stop, next(iter(scan(run_dir)), None))
            return EXIT_REQUEUE
        attempt = Attempt(ranks, t.ranks, run_dir, stop, t.preempt_grace_s, detector, callbacks).run()
        statuses = read_statuses(run_dir)
        checkpoint = next(iter(scan(run_dir)), None)
        ending = evidence.classify(attempt, t.ranks, stop.signal_name is not None)
        starter.say_the_rest(last=ending in (evidence.Ending.USER_ERROR, evidence.Ending.REQUEUE))
        if ending is evidence.Ending.DONE:
            return EXIT_DONE
        if ending is evidence.Ending.USER_ERROR:
            log.error("%s", evidence.user_error(attempt, statuses))
            return EXIT_USER_ERROR
        if ending is evidence.Ending.REQUEUE:
            _log_leaving(attempt, config, statuses, checkpoint, stop)
            return EXIT_REQUEUE

        decision = policy.crashed(evidence.furthest_step(statuses))
        if isinstance(decision, GiveUp):
            starter.say_the_rest(last=True)
            log.error("The run ends: %s.\n%s", decision.reason, evidence.report(attempt, t.ranks, statuses, checkpoint))
            return EXIT_CRASHED
        what = evidence.describe_crash(attempt, statuses)
        log.warning("Crash: %s. Restart %d of %d in %g s.", what, decision.number, t.max_restarts, decision.wait_s)
        cause = evidence.first_cause(attempt, statuses)
        if attempt.hang or (cause is not None and cause in statuses and statuses[cause].error):
            log.warning("How it happened:\n%s", evidence.report(attempt, t.ranks, statuses, checkpoint))
        stop.wait(decision.wait_s)
        if stop.signal_name is not None:
            _log_idle(stop, checkpoint)
            return EXIT_REQUEUE
        wait_for_ranks(run_dir)


def _log_idle(stop: StopRequest, checkpoint: Path | None) -> None:
    log.warning("%s %s. %s", stop.signal_name, IDLE, evidence.next_start(checkpoint))


def _log_leaving(
    attempt: evidence.AttemptResult,
    config: Config,
    statuses: dict[int, RankStatus],
    checkpoint: Path | None,
    stop: StopRequest,
) -> None:
    t = config.trainer
    asked = stop.signal_name or "A signal to the ranks"
    if unsaved := evidence.unsaved(statuses):
        log.error("%s", unsaved)
        return
    if all(code in (EXIT_REQUEUE, EXIT_DONE) for code in attempt.exits.values()) and len(attempt.exits) == t.ranks:
        log.info("%s: the ranks saved and left. %s", asked, evidence.next_start(checkpoint))
        return
    if attempt.idle:
        _log_idle(stop, checkpoint)
        return
    if stop.kill:
        log.warning(
            "Asked a second time: the ranks were killed at once. Nothing is lost but the work since the last "
            "checkpoint. %s",
            evidence.next_start(checkpoint),
        )
        return
    log.warning(
        "%s: not every rank saved and left within trainer.preempt_grace_s=%g. "
        "Nothing is lost but the work since the last checkpoint.\n%s",
        asked,
        t.preempt_grace_s,
        evidence.report(attempt, t.ranks, statuses, checkpoint),
    )
