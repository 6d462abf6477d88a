"""Interface between the launch policy and the ranks: start, watch, stop and kill them by their numbers.

Process ids, sockets, signals and the rendezvous address belong to an implementation, such as `rlhf.launch.local`.
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

    `died_with` describes the process whose death killed the rank, such as its launcher.
    """

    code: int
    died_with: str = ""

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
    """Rank -> text of its stacks. A rank that wrote none has no entry."""
    silent: dict[int, str] = field(default_factory=dict)
    """Rank -> likely reason for missing stacks. Every rank has an entry, also if it wrote stacks."""
    files: list[Path] = field(default_factory=list)
    """Files with the texts."""


class WatchedRanks(Protocol):
    """The part of `Ranks` that the hang detector uses."""

    def statuses(self) -> dict[int, RankStatus]:
        """Return the newest status of each rank, dead ranks included. A rank without a status file is missing."""

    def stacks(self, ranks: Collection[int]) -> Stacks:
        """Return the stacks of all threads of `ranks`. Only `kill` may follow for these ranks. May take seconds."""


class Ranks(WatchedRanks, Protocol):
    """The ranks of one attempt. A stop request to a rank that has ended does nothing."""

    def ended(self, wait_s: float) -> dict[int, RankExit]:
        """Return the ranks that ended since the last call. Wait up to `wait_s` seconds for the first end."""

    def request_stop(self, ranks: Collection[int]) -> None:
        """Ask ranks to save at the next safe point and leave with EXIT_REQUEUE."""

    def kill(self, ranks: Collection[int]) -> None:
        """Kill ranks, even dead ones, and the processes that they started."""


class RankStarter(Protocol):
    """Starts the ranks of successive attempts. Each rank runs `python *command`."""

    def check_devices(self) -> None:
        """Raise UserError if there are too few devices. If the run seems finished, `start` checks instead."""

    def start(self, command: Sequence[str], stop: StopRequest) -> Ranks | None:
        """Clear old statuses and start all ranks. Return None if a stop is requested before the ranks run."""

    def show_remaining_output(self, *, last: bool) -> None:
        """Show the remaining output of ended ranks. With `last` no attempt follows."""
