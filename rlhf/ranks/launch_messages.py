"""Messages between the supervisor and its launcher, pickled over a private socket."""

from dataclasses import dataclass

EVALUATE = "evaluate"
"""Command-line argument that makes `python -m rlhf.worker RUN_DIR` evaluate a policy instead of training it."""


@dataclass(frozen=True)
class Fork:
    """Request to fork `nproc` ranks that run `python *command` with `variables` in their environment."""

    command: tuple[str, ...]
    nproc: int
    variables: dict[str, str]


@dataclass(frozen=True)
class Forked:
    """Answer to `Fork` after the launcher's imports: process ids by rank, or why the launcher must not fork."""

    pids: dict[int, int]
    problem: str | None = None


@dataclass(frozen=True)
class RankEnded:
    """Notice that a rank has ended. `code` is its exit code, negative for a signal."""

    rank: int
    code: int


@dataclass(frozen=True)
class CountDevices:
    """Request to count the visible CUDA devices."""


@dataclass(frozen=True)
class Devices:
    """Answer to `CountDevices`: the count, or why the launcher cannot count."""

    count: int
    problem: str | None = None
