"""Classifies how an attempt ended, and describes the evidence in the log."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.launch.interface import RankExit
from rlhf.ranks.next_start import next_start
from rlhf.ranks.status import RankError, RankStatus

_TRACEBACK_LINES = 15
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Hang:
    """A hang that the watchdog found."""

    rank: int
    """The rank to blame: its peers wait for it."""
    what: str
    """Text with the phase in which the rank hangs, for how long, and the deadline."""
    where: dict[int, list[str]]
    """Rank -> its innermost stack frames, or the reason why it wrote none."""
    dumps: list[Path]
    """Files with the stacks of all threads, one per rank."""


@dataclass(frozen=True)
class AttemptResult:
    """End of each rank of an attempt."""

    exits: dict[int, RankExit]
    """The exit of each rank, in the order in which the ranks ended. A rank that survived SIGKILL is missing."""
    first: tuple[int, ...]
    """Ranks that failed within 0.1 s of the first failure."""
    killed: frozenset[int]
    """Ranks that the supervisor killed."""
    hang: Hang | None = None
    idle: bool = False
    """Whether a stop was requested before any rank had reached a step, so the supervisor killed all ranks at once."""


class Ending(Enum):
    """Outcome of an attempt."""

    DONE = "done"
    USER_ERROR = "user error"
    REQUEUE = "requeue"
    CRASH = "crash"


def classify(attempt: AttemptResult, nproc: int, stop_requested: bool) -> Ending:
    """Return the outcome of an attempt of `nproc` ranks. After a stop request a crash counts as a requeue.

    One rank with a user error or a requeue decides the outcome, whatever ended its peers.
    """
    codes = [end.code for end in attempt.exits.values()]
    if EXIT_USER_ERROR in codes:
        return Ending.USER_ERROR
    if len(codes) == nproc and all(code == EXIT_DONE for code in codes):
        return Ending.DONE
    if stop_requested or EXIT_REQUEUE in codes:
        return Ending.REQUEUE
    return Ending.CRASH


def first_cause(attempt: AttemptResult, statuses: dict[int, RankStatus]) -> int | None:
    """Return the rank whose death or hang ended its peers; None if no rank failed by itself.

    Of ranks that failed within 0.1 s, blame a rank that a signal killed: its peers' exceptions follow from the lost
    connection. Otherwise blame the rank with the earliest error in its status file.
    """

    def order(rank: int) -> tuple[bool, float]:
        status = statuses.get(rank)
        return attempt.exits[rank].code > 0, status.time if status and status.error else float("inf")

    if attempt.hang is not None:
        return attempt.hang.rank
    return min(attempt.first, key=order, default=None)


def cause_of(attempt: AttemptResult, statuses: dict[int, RankStatus]) -> str:
    """Return a text that is equal for crashes with the same cause: how the first rank ended, and its error.

    Differences in ranks, steps and other numbers do not change the text.
    """
    rank = first_cause(attempt, statuses)
    if rank is None:
        return describe_crash(attempt, statuses)
    status = statuses.get(rank)
    if attempt.hang is not None:
        return f"hang after {status.event if status else 'nothing'}"
    message = status.error.message.partition("\n")[0] if status and status.error else ""
    return _NUMBER.sub("N", f"{attempt.exits[rank]}: {message}")


def furthest_step(statuses: dict[int, RankStatus]) -> int | None:
    """Return the furthest step that any rank has reached; None before the first step."""
    return max((status.step for status in statuses.values() if status.step is not None), default=None)


def user_error(attempt: AttemptResult, statuses: dict[int, RankStatus]) -> str:
    """Return the message of the rank that ended with a user error."""
    for rank, end in attempt.exits.items():
        status = statuses.get(rank)
        if end.code == EXIT_USER_ERROR and status and status.error:
            return status.error.message
    return f"A rank ended with exit code {EXIT_USER_ERROR}, which a restart cannot fix, and left no message; see above."


def unsaved(statuses: dict[int, RankStatus]) -> str | None:
    """Return the message of a rank that left without saving; None if there is no such rank."""
    return next((s.error.message for s in statuses.values() if s.error and s.error.kind == "unsaved"), None)


def describe_crash(attempt: AttemptResult, statuses: dict[int, RankStatus]) -> str:
    """Return one line with the reason why the attempt ended."""
    cause = first_cause(attempt, statuses)
    if cause is not None:
        return describe_rank(cause, attempt, statuses)
    if died_with := next((end.died_with for end in attempt.exits.values() if end.died_with), None):
        return f"{died_with}, and its ranks died with it"
    return "a rank survived SIGKILL"


def describe_rank(rank: int, attempt: AttemptResult, statuses: dict[int, RankStatus]) -> str:
    """Return one line that says how the rank ended, at which step, and after which event."""
    if attempt.hang is not None and rank == attempt.hang.rank:
        ended = (
            "and was killed" if rank in attempt.exits else "and survived SIGKILL: its process is stuck in the kernel"
        )
        how = f"hung, {attempt.hang.what}, {ended}"
    elif rank in attempt.killed:
        how = "killed by the supervisor"
    elif rank in attempt.exits:
        end = attempt.exits[rank]
        how = f"died with {end.died_with}" if end.died_with else str(end)
    else:
        how = "survived SIGKILL: its process is stuck in the kernel"
    return f"rank {rank}: {how}, {_place(statuses.get(rank))}"


def _place(status: RankStatus | None) -> str:
    if status is None:
        return "while starting"
    step = "before the first step" if status.step is None else f"at step {status.step}"
    return f"{step}, last event {status.event}"


def describe_hang(hang: Hang, statuses: dict[int, RankStatus], checkpoint: Path | None, trainer: TrainerConfig) -> str:
    """Return a report of a hang: the rank to blame, the stacks, and where the next start continues."""
    what = f"rank {hang.rank}: {hang.what}, {_place(statuses.get(hang.rank))}"
    return "\n".join([what, *_stacks(hang), f"  {next_start(checkpoint, trainer)}"])


def report(
    attempt: AttemptResult,
    nproc: int,
    statuses: dict[int, RankStatus],
    checkpoint: Path | None,
    trainer: TrainerConfig,
    node_problems: Sequence[str] = (),
) -> str:
    """Return a report of a crash: all ranks, the end of the first traceback, and where the next start continues.

    `node_problems`: problems that checks of this node found after the crash, a line each.
    """
    cause = first_cause(attempt, statuses)
    lines = []
    for rank in range(nproc):
        mark = "  (the first to fail)" if rank == cause and nproc > 1 else ""
        lines.append(f"  {describe_rank(rank, attempt, statuses)}{mark}")
    if found := _first_error(cause, statuses):
        rank, error = found
        first, *more = error.message.splitlines() if error.traceback else [error.message]
        lines.append(f"  rank {rank}'s error: {first}")
        # The end of the traceback repeats the rest of the message.
        end = error.traceback.rstrip().splitlines()[-_TRACEBACK_LINES - len(more) :]
        lines += [f"    {line}" for line in end]
    if attempt.hang is not None:
        lines += _stacks(attempt.hang)
    if node_problems:
        lines.append("  Two crashes in a row have the same cause. Checks of this node found:")
        lines += [f"    {line}" for line in node_problems]
    lines.append(f"  {next_start(checkpoint, trainer)}")
    return "\n".join(lines)


def _stacks(hang: Hang) -> list[str]:
    lines = []
    for rank, where in sorted(hang.where.items(), key=lambda entry: entry[0] != hang.rank):
        lines.append(f"  rank {rank} {'hangs' if rank == hang.rank else 'is'} here:")
        lines += [f"    {line}" for line in where]
    if hang.dumps:
        lines.append(f"  The stacks of all threads: {', '.join(map(str, hang.dumps))}")
    return lines


def _first_error(cause: int | None, statuses: dict[int, RankStatus]) -> tuple[int, RankError] | None:
    errors = [(rank != cause, status.time, rank, status.error) for rank, status in statuses.items() if status.error]
    if not errors:
        return None
    _, _, rank, error = min(errors, key=lambda entry: entry[:3])
    return rank, error
