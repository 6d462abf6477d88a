"""Runs one rank: builds its components, trains, and returns an exit code of `rlhf.errors`."""

import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

from rlhf.ranks.parent import SUPERVISOR_PID, die_with_parent

if __name__ == "__main__":
    # Call this before the slow imports: if the supervisor dies during the imports, this rank must die, too.
    die_with_parent()

import torch

from rlhf.assemble.frozen_policy import build_evaluation
from rlhf.assemble.run import build
from rlhf.checkpoint.remote.copies import check_copied
from rlhf.config import Config
from rlhf.config.redaction import Redaction
from rlhf.config.resolved import from_yaml, schema, to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, Preempted, Unsaved, UserError
from rlhf.events import announce, subscribe_from_environment
from rlhf.lifecycle import run_lifecycle
from rlhf.loop import train
from rlhf.ranks import collectives
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.launch_messages import EVALUATE
from rlhf.ranks.lock import lock_as_rank
from rlhf.ranks.logs import configure_logging, write_whole_lines
from rlhf.ranks.next_start import changes_to_continue
from rlhf.ranks.progress_pipe import ProgressDisplay, ProgressPipe
from rlhf.ranks.status import STACKS_SIGNAL, StatusWriter, clear_statuses
from rlhf.ranks.watchdog_process import node_watchdog
from rlhf.storage.disk_errors import is_unfixable
from rlhf.storage.layout import RESOLVED
from rlhf.tracking.outcome import Outcome
from rlhf.tracking.run_output import OutputHandler, RunOutput

log = logging.getLogger(__name__)
schema()  # fills the cache once in a launcher, for all ranks that it forks


def evaluate(
    config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter, shown: ProgressDisplay
) -> None:
    """Build the components of an evaluation and evaluate. Close reward processes and rollout engines, as `run` does."""
    evaluation = build_evaluation(config, device, coordinator, status, shown)
    try:
        evaluation.run()
    finally:
        evaluation.run_log.close()
        evaluation.reward.close()
        if evaluation.environments is not None:
            evaluation.environments.close()
        evaluation.engine.close()


def run(
    config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter, shown: ProgressDisplay
) -> None:
    """Build the components and train. Close trackers, reward processes and rollout engines, also after an error."""
    components = build(config, device, coordinator, status, shown)
    outcome: Outcome = "failed"
    try:
        train(components)
        outcome = "finished"
        announce("end.before")  # not in `finally`: after a crash the status file must keep the event before the crash
        check_copied(components.checkpointer.not_copied, config.run_dir, config.trainer, config.checkpoint)
    except (Preempted, Unsaved):
        outcome = "stopped" if outcome == "failed" else outcome
        raise
    finally:
        components.run_log.close(outcome)
        components.reward.close()
        if components.environments is not None:
            components.environments.close()
        components.engine.close()


class _Evidence:
    """Records why this rank ended: in its status file after `begin`, and in the log if no supervisor does so."""

    def __init__(self) -> None:
        self.status: StatusWriter | None = None
        self.changes = ""
        """The result of `changes_to_continue`, once the configuration is known."""

    def begin(self, run_dir: Path) -> StatusWriter:
        """Create the status file, once the run directory belongs to this launch."""
        self.status = StatusWriter(run_dir, rank())
        return self.status

    def crash(self, error: Exception) -> None:
        """Write `error` and its traceback. The supervisor reports the rank that failed first."""
        if self.status is not None:
            redact = Redaction(os.environ)
            self.status.error("crash", redact(f"{type(error).__name__}: {error}"), redact(traceback.format_exc()))
        if self.status is None or SUPERVISOR_PID not in os.environ:
            log.exception("Rank %s crashed.", os.environ["RANK"])

    def end(self, kind: Literal["user", "unsaved"], message: str) -> None:
        """Write why the run ends. The supervisor logs the message once for all ranks."""
        if self.status is not None:
            self.status.error(kind, Redaction(os.environ)(message))
        if self.status is None or SUPERVISOR_PID not in os.environ:
            log.error("%s", message)


def main(run_dir: Path, *, evaluates: bool = False) -> int:
    """Run a rank that the supervisor started, and return its exit code.

    The supervisor has taken the run lock and written the configuration.
    """

    def work(evidence: _Evidence) -> None:
        shown = ProgressPipe.from_environment()
        shown.phase(rank(), 0, "starting the ranks", 0, 0)
        status = evidence.begin(run_dir)
        config = from_yaml((run_dir / RESOLVED).read_text())
        evidence.changes = changes_to_continue(config.trainer)
        lock_as_rank(run_dir)
        device = _join(config)
        (evaluate if evaluates else run)(config, device, _coordinator(config), status, shown)

    # With this call, lines that the user's functions print appear at once, and a death of this process loses none.
    write_whole_lines()
    configure_logging(rank())
    return _guarded(work)


def main_under_torchrun(config: Config, banner: str = "", *, evaluates: bool = False) -> int:
    """Run a rank of torchrun or a similar launcher, and return its exit code.

    No supervisor exists, so the ranks themselves prepare the run directory and finish the run. The caller has printed
    `banner`, so write it only to the run's log.
    """
    # All ranks share the launcher's terminal, so show a bar only if the setting requires a bar.
    mode = "plain" if config.tracking.progress == "auto" else config.tracking.progress
    output = RunOutput("plain" if rank() else mode, Redaction(os.environ))

    def work(evidence: _Evidence) -> None:
        faulthandler.register(STACKS_SIGNAL, all_threads=True)  # stacks go to stderr until `StatusWriter` begins
        evidence.changes = changes_to_continue(config.trainer)
        device = _join(config)
        coordinator = _coordinator(config)
        # Every rank has composed a configuration. All ranks use the leader's.
        agreed = from_yaml(coordinator.broadcast(to_yaml(config)))

        def attempt() -> int:
            coordinator.on_domain_leaders(lambda: clear_statuses(agreed.run_dir))
            status = evidence.begin(agreed.run_dir)
            with node_watchdog(agreed.run_dir, agreed.trainer, coordinator):
                output.begin_bar()
                work_on = evaluate if evaluates else run
                work_on(agreed, device, coordinator, status, ProgressDisplay() if rank() else output.progress)
            return EXIT_DONE

        run_lifecycle(agreed, coordinator, output, attempt, reports=not evaluates)

    with output:
        configure_logging(rank(), OutputHandler(output))
        if banner:
            output.only_log(banner)
        return _guarded(work)


def _join(config: Config) -> torch.device:
    return collectives.start(config.trainer, remote_servers=bool(config.rollout.servers.urls))


def _coordinator(config: Config) -> Coordinator:
    return Coordinator(GlooTransport(timedelta(seconds=config.checkpoint.timeout_s)))


def rank() -> int:
    return int(os.environ["RANK"])


def _guarded(work: Callable[[_Evidence], None]) -> int:
    subscribe_from_environment()
    evidence = _Evidence()
    try:
        work(evidence)
        collectives.stop()
        return EXIT_DONE
    except Preempted as request:
        if SUPERVISOR_PID not in os.environ:  # the supervisor logs that all ranks have saved
            log.info("%s", request)
        return EXIT_REQUEUE
    except Unsaved as error:
        evidence.end("unsaved", str(error))
        return EXIT_REQUEUE
    except UserError as error:
        evidence.end("user", str(error))
        return EXIT_USER_ERROR
    except Exception as error:
        if is_unfixable(error):
            evidence.end("user", f"{error}. Fix it and run the same command{evidence.changes} again.")
            return EXIT_USER_ERROR
        evidence.crash(error)
        return EXIT_CRASHED


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), evaluates=EVALUATE in sys.argv[2:])
    logging.shutdown()
    with suppress(OSError, ValueError):  # the process that reads stdout may be dead
        sys.stdout.flush()
    # Do not use sys.exit: after an error, threads of the process group may wait forever for dead peers.
    os._exit(code)
