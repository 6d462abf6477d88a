"""Interface of ranks that the launch policy starts, watches, asks and kills, wherever they run.

The policy (restarts, hangs, evidence) knows a rank by its number and by how it ended. Process ids, sockets, signals and
the address at which the ranks meet belong to an implementation, such as `rlhf.launch.local`.
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
    """End of a rank: its exit code, negative for a signal. `taken_by` describes what ended before and took the rank
    along, such as its launcher."""

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
    """Stacks of all threads of ranks that were asked for them."""

    texts: dict[int, str] = field(default_factory=dict)
    """What each rank wrote; no entry for one without an answer."""
    silent: dict[int, str] = field(default_factory=dict)
    """The reason why a rank may not answer, in words, for every rank that was asked."""
    files: list[Path] = field(default_factory=list)
    """Files that keep the texts for users."""


class WatchedRanks(Protocol):
    """Ranks as far as is needed to find out whether, and where, they hang."""

    def statuses(self) -> dict[int, RankStatus]:
        """The status that each rank has left, also a dead one; one may be missing for a moment."""

    def stacks(self, ranks: Collection[int]) -> Stacks:
        """Ask ranks for the stacks of all their threads. Takes some seconds if one does not answer; the ranks can only
        be killed then."""


class Ranks(WatchedRanks, Protocol):
    """The ranks of one attempt. Ranks that have ended are passed over."""

    def ended(self, wait_s: float) -> dict[int, RankExit]:
        """Ends of ranks since the last call; waits up to `wait_s` seconds for the first of them."""

    def ask_to_leave(self, ranks: Collection[int]) -> None:
        """Ask ranks to save at the next safe point and leave with EXIT_REQUEUE."""

    def kill(self, ranks: Collection[int]) -> None:
        """End ranks, dead ones too, and all processes that they have started, at once."""


class RankStarter(Protocol):
    """Starts the ranks of one attempt after the other, each a `python *command`."""

    def check_devices(self) -> None:
        """Raise UserError when there are fewer devices than the ranks need. If no ranks are expected, `start` does."""

    def start(self, command: Sequence[str], stop: StopRequest) -> Ranks | None:
        """Start all ranks, without statuses of an earlier attempt; None when `stop` is requested before they run."""

    def say_the_rest(self, *, last: bool) -> None:
        """Show all output that ended ranks left unread; with `last` no others follow."""
