"""Checks that the copies of background saves fit into a machine's memory, before the first copy.

Linux lets processes allocate more memory than exists, and its OOM killer would then end a rank during the copy.
"""

import platform
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes that this process can still allocate; None if the system reports no limit.

    This is the minimum of the kernel's available memory and the unused part of each control group's limit. The control
    groups, of cgroup version 1 or 2, are the process's own group and all its parents.
    """
    known = [*_of_kernel(proc), *_of_groups(proc, cgroups)]
    return max(0, min(known)) if known else None


def _of_kernel(proc: Path) -> Iterator[int]:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = top / path.lstrip("/")
        # In a container the path may be the host's path. Then the limit is in the top group.
        for group in {top, own, *(parent for parent in own.parents if parent.is_relative_to(top))}:
            yield from _remaining(group, *names)


def _remaining(group: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    limits, usage = _lines(group / limit), _lines(group / used)
    if limits and usage and limits[0] != "max":
        # The kernel evicts inactive file pages on demand.
        stats = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
        yield int(limits[0]) - int(usage[0]) + int(stats.get(cache, 0))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # missing or not readable
        return []


def check_memory(
    nbytes: int,
    coordinator: Coordinator,
    reason: str = "checkpoint.async_save=true: background saves are written from copies. For the copies",
    remedy: str = "checkpoint.async_save=false",
) -> None:
    """Raise UserError on every rank when a machine lacks memory for its ranks' copies; `nbytes` is the size of this
    rank's copies. Collective."""
    needed: defaultdict[str, list[int]] = defaultdict(list)
    available: dict[str, int] = {}
    for host, size, free in coordinator.all_gather((platform.node(), nbytes, available_memory())):
        needed[host].append(size)
        if free is not None:
            available[host] = min(free, available.get(host, free))
    for host, sizes in needed.items():
        if host in available and sum(sizes) > available[host]:
            raise UserError(
                f"{reason}, the ranks of {host} ({len(sizes)}) need {sum(sizes) / 2**20:.1f} MiB of memory, and "
                f"{available[host] / 2**20:.1f} MiB are available there (limits of control groups included). Set "
                f"{remedy}, or give the machine more memory."
            )
