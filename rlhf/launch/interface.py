"""Interface between the launch policy and the ranks: start them, watch them, ask them to leave, kill them.

The policy (restarts, hangs, evidence) identifies a rank by its number. Process ids, sockets, signals and the rendezvous
address belong to an implementation, such as `rlhf.launch.local`.
"""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlhf.launch.stop_request import StopRequest
from rlhf.ranks.status import RankStatus


@dataclass(frozen=True)
class RankExit:
    """End of a rank. `code` is its exit code, or minus the number of the signal that killed it.

    If the rank died because another process did, such as its launcher, `taken_by` describes that process.
    """

    code: int
    taken_by: str = ""

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        if -self.code == signal.SIGKILL:
            return "SIGKILL (often the kernel's out-of-memory killer)"
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


@dataclass(frozen=True)
class Stacks:
    """Stacks of all threads of some ranks."""

    texts: dict[int, str] = field(default_factory=dict)
    """Rank -> its stacks as text. A rank that did not answer has no entry."""
    silent: dict[int, str] = field(default_factory=dict)
    """Rank -> a likely reason why it would not answer, in words. Every rank that was asked has an entry."""
    files: list[Path] = field(default_factory=list)
    """Files with the texts, for users."""


class WatchedRanks(Protocol):
    """The part of `Ranks` that is needed to find hangs."""

    def statuses(self) -> dict[int, RankStatus]:
        """Return the newest status of each rank, dead ranks included. A rank that has written none yet is missing."""

    def stacks(self, ranks: Collection[int]) -> Stacks:
        """Return the stacks of all threads of `ranks`. Takes some seconds if a rank does not answer.

        After this call the ranks can only be killed.
        """


class Ranks(WatchedRanks, Protocol):
    """The ranks of one attempt. Requests to ranks that have ended are ignored."""

    def ended(self, wait_s: float) -> dict[int, RankExit]:
        """Return the ranks that ended since the last call. Waits up to `wait_s` seconds for the first one."""

    def ask_to_leave(self, ranks: Collection[int]) -> None:
        """Ask ranks to save at the next safe point and leave with EXIT_REQUEUE."""

    def kill(self, ranks: Collection[int]) -> None:
        """Kill ranks and all processes that they started. For a dead rank, kill the processes that it left."""


class RankStarter(Protocol):
    """Starts the ranks of successive attempts. Each rank runs `python *command`."""

    def check_devices(self) -> None:
        """Raise UserError if there are fewer devices than the ranks need.

        If no ranks are expected to start, because the run seems finished, `start` makes this check instead.
        """

    def start(self, command: Sequence[str], stop: StopRequest) -> Ranks | None:
        """Clear the statuses of the last attempt and start all ranks. None if `stop` is requested before they run."""

    def show_remaining_output(self, *, last: bool) -> None:
        """Show the output of ended ranks that was not shown yet. `last` says that no attempt follows."""
