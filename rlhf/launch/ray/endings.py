"""Decides, when a machine's ranks have ended, whether Ray restarts all ranks or the run ends. Imports no Ray."""

import signal
from collections.abc import Collection, Iterable
from pathlib import Path

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.launch.evidence import furthest_step
from rlhf.launch.restart_policy import GiveUp, RestartPolicy
from rlhf.ranks.status import read_statuses
from rlhf.storage.layout import scan, step_of


class RanksEnded(Exception):
    """The ranks of a machine ended with an exit code of `rlhf.errors` other than EXIT_DONE.

    Args:
        code: the exit code of the machine (`code_of`).
        step: the furthest step that the ranks reached; None before the first step.
        continues: whether Ray restarts the saved run, because a machine goes away or another one has room.
        message: what happened, for the user.
    """

    def __init__(self, code: int, step: int | None, continues: bool, message: str) -> None:
        super().__init__(code, step, continues, message)
        self.code, self.step, self.continues, self.message = code, step, continues, message

    def __str__(self) -> str:
        return self.message


class RunEnds(Exception):
    """Ray must not restart the ranks: the run ends with `code`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return self.message


class Endings:
    """Applies `trainer.max_restarts` and `trainer.max_failures_per_step` to the crashes under Ray."""

    def __init__(self, trainer: TrainerConfig, run_dir: Path) -> None:
        self._policy, self._run_dir = RestartPolicy(trainer), run_dir
        self._counted: set[str] = set()  # messages of Ray's errors that were already counted as a crash

    def after(self, errors: Iterable[Exception]) -> float:
        """Return the seconds to wait before Ray restarts all ranks.

        Args:
            errors: one per failed worker. Any error but RanksEnded means that Ray lost the worker or its machine.

        Raises:
            RunEnds: the run must end.
        """
        errors = list(errors)
        ends = [error for error in errors if isinstance(error, RanksEnded)]
        for code in (EXIT_USER_ERROR, EXIT_REQUEUE):
            if (end := next((end for end in ends if end.code == code), None)) is not None:
                if code == EXIT_REQUEUE and any(each.continues for each in ends):
                    return 0.0
                raise RunEnds(code, end.message)
        # While a machine drains, each of Ray's checks reports the same failure, in the same words. Count it once.
        lost = {str(error) for error in errors if not isinstance(error, RanksEnded)}
        if lost and lost <= self._counted:
            return 0.0
        self._counted |= lost
        steps = [end.step for end in ends if end.step is not None]
        if (reached := furthest_step(read_statuses(self._run_dir))) is not None:
            steps.append(reached)
        if (newest := next(iter(scan(self._run_dir)), None)) is not None:
            steps.append(step_of(newest) or 0)
        decision = self._policy.crashed(max(steps, default=None))
        if isinstance(decision, GiveUp):
            raise RunEnds(EXIT_CRASHED, f"The run ends: {decision.reason}.")
        return decision.wait_s


def code_of(codes: Collection[int], nproc: int, *, stopped: bool) -> int:
    """Return the exit code of a machine whose `nproc` ranks ended with `codes`; ranks that were killed are missing.

    One rank's user mistake or requeue request decides, whatever the other ranks' exit codes are.
    """
    if EXIT_USER_ERROR in codes:
        return EXIT_USER_ERROR
    if len(codes) == nproc and all(code == EXIT_DONE for code in codes):
        return EXIT_DONE
    return EXIT_REQUEUE if stopped or EXIT_REQUEUE in codes else EXIT_CRASHED


def in_words(rank: int, code: int) -> str:
    """Return how a rank ended. `code` is negative for a signal."""
    return f"rank {rank} died with {signal.Signals(-code).name}" if code < 0 else f"rank {rank} exited with code {code}"
