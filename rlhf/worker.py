"""One rank: builds its components, runs the loop, and says in its exit code how it ended."""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Literal

from rlhf.ranks.parent import SUPERVISOR_PID, die_with_parent

if __name__ == "__main__":
    # Before the slow imports: a supervisor that dies meanwhile must take this rank with it.
    die_with_parent()

import torch
import torch.distributed as dist

from rlhf.assemble.run import build
from rlhf.checkpoint.remote.copies import check_copied, copy_pending
from rlhf.checkpoint.start.domains import find_domains
from rlhf.checkpoint.start.preparation import finished_step, prepare
from rlhf.config import Config
from rlhf.config.compare import ResolvedConfig
from rlhf.config.resolved import from_yaml, to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, Preempted, Unsaved, UserError
from rlhf.events import announce, subscribe_from_environment
from rlhf.loop import train
from rlhf.ranks import collectives
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.lock import hold_rank_lock, run_lock
from rlhf.ranks.logs import configure_logging
from rlhf.ranks.status import StatusWriter
from rlhf.storage.disk_errors import is_unfixable
from rlhf.storage.layout import RESOLVED
from rlhf.tracking import write_report

log = logging.getLogger(__name__)


def run(config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter) -> None:
    """Build and train; trackers, reward processes and rollout engines are closed however it ends."""
    components = build(config, device, coordinator, status)
    try:
        train(components)
        announce("end.before")  # only here: what a crash leaves as evidence is where it happened
        check_copied(components.checkpointer.not_copied, config.run_dir, config.checkpoint)
    finally:
        components.run_log.close()
        components.reward.close()
        components.engine.close()


def main(run_dir: Path) -> int:
    """A rank under our supervisor, which holds the run lock and has written the resolved configuration."""
    config = from_yaml((run_dir / RESOLVED).read_text())

    def work(status: StatusWriter) -> None:
        hold_rank_lock(run_dir)
        device = collectives.start(config.trainer)
        run(config, device, _coordinator(config), status)

    return _guarded(run_dir, work)


def main_under_torchrun(config: Config) -> int:
    """A rank that torchrun started: the leader (of each storage domain) does what our supervisor would have done before
    and after."""

    def work(status: StatusWriter) -> None:
        device = collectives.start(config.trainer)
        coordinator = _coordinator(config)
        # Every rank composed by itself; the leader's result is the one that counts.
        agreed = from_yaml(coordinator.broadcast(to_yaml(config)))
        left: list[int] = []
        with ExitStack() as locks:
            coordinator.domains = find_domains(agreed.run_dir, coordinator)
            coordinator.on_domain_leaders(lambda: locks.enter_context(run_lock(agreed.run_dir)))
            resolved = ResolvedConfig.of(agreed)
            prepare(agreed.run_dir, agreed.trainer, agreed.checkpoint, resolved, coordinator)
            finished = finished_step(agreed.run_dir, agreed.trainer, resolved, coordinator)
            if finished is None:
                run(agreed, device, coordinator, status)
            elif coordinator.is_leader:
                left = copy_pending(agreed.run_dir, agreed.trainer, agreed.checkpoint)
                log.info("The run in %s is finished at step %d.", agreed.run_dir, finished)
            if coordinator.is_leader:
                log.info("Done.\n%s", write_report(agreed.run_dir))
        check_copied(left, agreed.run_dir, agreed.checkpoint)

    return _guarded(config.run_dir, work)


def _coordinator(config: Config) -> Coordinator:
    return Coordinator(GlooTransport(timedelta(seconds=config.checkpoint.timeout_s)))


def _guarded(run_dir: Path, work: Callable[[StatusWriter], None]) -> int:
    """Run `work` and turn its end into an exit code; an error is left in the status file as evidence."""
    rank = int(os.environ["RANK"])
    configure_logging(rank)
    try:
        status = StatusWriter(run_dir, rank)
    except OSError as error:
        log.error(
            "Cannot write into %s (%s). Set trainer.default_local_dir to a writable folder.", run_dir, error.strerror
        )
        return EXIT_USER_ERROR
    subscribe_from_environment()
    try:
        work(status)
        dist.destroy_process_group()
        return EXIT_DONE
    except Preempted as request:
        log.info("%s", request)
        return EXIT_REQUEUE
    except Unsaved as error:
        _tell(status, "unsaved", str(error))
        return EXIT_REQUEUE
    except UserError as error:
        _tell(status, "user", str(error))
        return EXIT_USER_ERROR
    except Exception as error:
        if is_unfixable(error):
            _tell(status, "user", f"{error}. Mend it and run the same command again.")
            return EXIT_USER_ERROR
        status.error("crash", f"{type(error).__name__}: {error}", traceback.format_exc())
        # The supervisor shows the first rank's, and not the peers' that follow from it.
        if SUPERVISOR_PID not in os.environ:
            log.exception("Rank %d crashed.", rank)
        return EXIT_CRASHED


def _tell(status: StatusWriter, kind: Literal["user", "unsaved"], message: str) -> None:
    status.error(kind, message)
    if SUPERVISOR_PID not in os.environ:  # the supervisor shows it itself, once
        log.error("%s", message)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    logging.shutdown()
    # Not sys.exit: after an error the process group's threads may wait for peers that are gone.
    os._exit(code)
