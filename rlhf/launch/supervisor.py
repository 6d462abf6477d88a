"""Supervises a run: locks the run directory, starts and restarts the ranks.

If the supervisor dies, the ranks die with it. The supervisor has no training state, so a new one can continue the run.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlhf.config import Config
from rlhf.config.redaction import Redaction
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, Unsaved, UserError
from rlhf.launch import evidence
from rlhf.launch.attempt import Attempt
from rlhf.launch.callbacks import Callbacks
from rlhf.launch.crash_checks import node_problems
from rlhf.launch.hangs import HangDetector
from rlhf.launch.interface import RankStarter
from rlhf.launch.local.rank_output import RankOutput
from rlhf.launch.local.starter import LocalStarter, RankNeeds
from rlhf.launch.restart_policy import GiveUp, Restart, RestartPolicy
from rlhf.launch.stop_request import StopRequest
from rlhf.lifecycle import reject_another_run, run_lifecycle
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.launch_messages import EVALUATE
from rlhf.ranks.lock import wait_for_ranks
from rlhf.ranks.logs import configure_logging
from rlhf.ranks.next_start import changes_to_continue, next_start
from rlhf.ranks.run_events import record_event
from rlhf.ranks.status import RankStatus
from rlhf.ranks.stop import IDLE
from rlhf.ranks.transport import Transport
from rlhf.storage.disk_errors import is_unfixable, is_unreadable
from rlhf.storage.layout import HISTORY, scan, step_of
from rlhf.tracking.run_output import OutputHandler, RunOutput

NO_CALLBACKS = Callbacks()

log = logging.getLogger(__name__)


def supervise(
    config: Config,
    check: Callable[[], None],
    banner: str = "",
    callbacks: Callbacks = NO_CALLBACKS,
    *,
    evaluates: bool = False,
) -> int:
    """Train to the end of the run; with `evaluates`, only evaluate the policy. Return an exit code of `rlhf.errors`.

    Args:
        check: raises UserError for mistakes in the configuration. While `check` runs, the launcher imports the ranks'
            modules.

    Raises:
        UserError: before any rank has started: `check` raised, there are too few devices, or the run directory is in
            use, not writable or another run's.
    """
    with RunOutput(config.tracking.progress, Redaction(os.environ)) as output:
        configure_logging(handler=OutputHandler(output))
        if banner:
            output.line(banner)
        output.begin_bar()
        output.progress.phase(0, 0, "starting")
        try:
            return _supervise(config, check, output, callbacks, evaluates)
        except OSError as error:
            if not is_unreadable(error):
                raise
            where = error.filename or "A file"
            again = f"the same command{changes_to_continue(config.trainer)} again"
            log.error("%s: %s. Run %s. If it fails again, check the disk.", where, error.strerror, again)
            return EXIT_CRASHED


def _supervise(
    config: Config, check: Callable[[], None], output: RunOutput, callbacks: Callbacks, evaluates: bool
) -> int:
    expected, single_process = not _seems_finished(config), Coordinator(Transport())
    needs = RankNeeds.of(config.trainer, config.data, config.backend, config.rollout)
    with (
        RankOutput(output) as of_ranks,
        LocalStarter(config.trainer, config.run_dir, needs, of_ranks, expected=expected) as starter,
    ):
        with _usable(config.run_dir):
            reject_another_run(config, single_process)
        check()

        def train() -> int:
            callbacks.follow(config.run_dir / HISTORY)
            command = ["-m", "rlhf.worker", str(config.run_dir), *([EVALUATE] if evaluates else [])]
            with StopRequest() as stop:
                code = run_attempts(config, command, starter, stop, callbacks)
                callbacks.look(stop)
            return code

        try:
            with _usable(config.run_dir):
                return run_lifecycle(
                    config, single_process, output, train, starter.check_devices, reports=not evaluates
                )
        except Unsaved as error:
            log.error("%s", error)
            return EXIT_REQUEUE


@contextmanager
def _usable(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_unfixable(error):
            error.filename = error.filename or str(run_dir)
            raise
        raise UserError(
            f"Cannot read or write the run directory {run_dir}: {error}. Fix this, or set trainer.default_local_dir to "
            "a writable folder with free space."
        ) from error


def _seems_finished(config: Config) -> bool:
    """Return whether the newest checkpoint's name says that it is the checkpoint of the last step."""
    try:
        newest = next(iter(scan(config.run_dir)), None)
    except OSError:  # `reject_another_run` reports the error
        return False
    t = config.trainer
    return newest is not None and not t.overwrite and step_of(newest) == t.total_training_steps


def run_attempts(
    config: Config, command: Sequence[str], starter: RankStarter, stop: StopRequest, callbacks: Callbacks = NO_CALLBACKS
) -> int:
    """Start `trainer.nproc` ranks of `python *command`, restart them after crashes, and return the run's exit code."""
    t = config.trainer
    run_dir = config.run_dir
    policy = RestartPolicy(t)
    detector = HangDetector(t, config.checkpoint.timeout_s) if t.watchdog else None
    while True:
        ranks = starter.start(command, stop)
        if ranks is None:
            _log_idle(stop, config)
            return EXIT_REQUEUE
        attempt = Attempt(ranks, t.ranks, stop, t.preempt_grace_s, detector, callbacks).run()
        statuses = ranks.statuses()
        checkpoint = next(iter(scan(run_dir)), None)
        ending = evidence.classify(attempt, t.ranks, stop.signal_name is not None)
        starter.show_remaining_output(last=ending in (evidence.Ending.USER_ERROR, evidence.Ending.REQUEUE))
        if ending is evidence.Ending.DONE:
            return EXIT_DONE
        if ending is evidence.Ending.USER_ERROR:
            log.error("%s", message := evidence.user_error(attempt, statuses))
            record_event(run_dir, "failed", cause=message, step=evidence.furthest_step(statuses))
            return EXIT_USER_ERROR
        if ending is evidence.Ending.REQUEUE:
            _log_leaving(attempt, config, statuses, checkpoint, stop)
            cause = evidence.unsaved(statuses) or stop.signal_name or "a signal to the ranks"
            record_event(run_dir, "stopped", cause=cause, step=evidence.furthest_step(statuses))
            return EXIT_REQUEUE

        decision = policy.crashed(evidence.furthest_step(statuses))
        is_second = policy.is_second(evidence.cause_of(attempt, statuses))
        problems = node_problems(run_dir, stop) if is_second else []
        _report_crash(config, attempt, statuses, checkpoint, decision, starter, problems)
        if isinstance(decision, GiveUp):
            return EXIT_CRASHED
        stop.wait(decision.wait_s)
        if stop.signal_name is not None:
            _log_idle(stop, config)
            return EXIT_REQUEUE
        wait_for_ranks(run_dir)


def _report_crash(
    config: Config,
    attempt: evidence.AttemptResult,
    statuses: dict[int, RankStatus],
    checkpoint: Path | None,
    decision: Restart | GiveUp,
    starter: RankStarter,
    problems: Sequence[str],
) -> None:
    """Log and record a crash.

    Log the evidence, too, if ranks hung, the failed rank left an error, this node has `problems`, or the run ends.
    """
    t, step = config.trainer, evidence.furthest_step(statuses)
    what = evidence.describe_crash(attempt, statuses)
    how = evidence.report(attempt, t.ranks, statuses, checkpoint, t, problems)
    facts = {"step": step, "details": how, "hang": attempt.hang is not None}
    if isinstance(decision, GiveUp):
        starter.show_remaining_output(last=True)
        log.error("The run ends: %s.\n%s", decision.reason, how)
        record_event(config.run_dir, "failed", cause=f"{decision.reason}; {what}", **facts)
        return
    log.warning("Crash: %s. Restart %d of %d in %g s.", what, decision.number, t.max_restarts, decision.wait_s)
    cause = evidence.first_cause(attempt, statuses)
    if problems or attempt.hang or (cause is not None and cause in statuses and statuses[cause].error):
        log.warning("How it happened:\n%s", how)
    restart = {"restart": decision.number, "max_restarts": t.max_restarts}
    record_event(config.run_dir, "crashed", cause=what, **facts, **restart)


def _log_idle(stop: StopRequest, config: Config) -> None:
    checkpoint = next(iter(scan(config.run_dir)), None)
    log.warning("%s %s %s", stop.signal_name, IDLE, next_start(checkpoint, config.trainer))
    record_event(config.run_dir, "stopped", cause=stop.signal_name)


def _log_leaving(
    attempt: evidence.AttemptResult,
    config: Config,
    statuses: dict[int, RankStatus],
    checkpoint: Path | None,
    stop: StopRequest,
) -> None:
    t = config.trainer
    reason = stop.signal_name or "A signal to the ranks"
    if unsaved := evidence.unsaved(statuses):
        log.error("%s", unsaved)
        return
    if all(end.code in (EXIT_REQUEUE, EXIT_DONE) for end in attempt.exits.values()) and len(attempt.exits) == t.ranks:
        log.info("%s: the ranks saved and left. %s", reason, next_start(checkpoint, t))
        return
    if attempt.idle:
        log.warning("%s %s %s", stop.signal_name, IDLE, next_start(checkpoint, t))
        return
    if stop.kill:
        log.warning(
            "Second stop signal: the ranks were killed at once. Only the work since the last checkpoint is lost. %s",
            next_start(checkpoint, t),
        )
        return
    log.warning(
        "%s: not every rank saved and left within trainer.preempt_grace_s=%g. "
        "Only the work since the last checkpoint is lost.\n%s",
        reason,
        t.preempt_grace_s,
        evidence.report(attempt, t.ranks, statuses, checkpoint, t),
    )
