"""Messages between the supervisor and its launcher, pickled over a socket that only these two have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fork:
    """Request to the launcher: fork ranks 0 to `nproc` - 1, each to run `python *command` with `variables` in its
    environment."""

    command: tuple[str, ...]
    nproc: int
    variables: dict[str, str]


@dataclass(frozen=True)
class Forked:
    """Answer to `Fork`, once the launcher's imports are done: the process ids by rank, or why it must not fork."""

    pids: dict[int, int]
    problem: str | None = None


@dataclass(frozen=True)
class RankEnded:
    """Notice from the launcher: a rank has ended, with an exit code that is negative for a signal."""

    rank: int
    code: int


@dataclass(frozen=True)
class CountDevices:
    """Question to the launcher: how many CUDA devices are visible?"""


@dataclass(frozen=True)
class Devices:
    """Answer to `CountDevices`, or why the launcher can't tell."""

    count: int
    problem: str | None = None
