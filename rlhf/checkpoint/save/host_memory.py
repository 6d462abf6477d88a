"""Memory of a machine, and whether the copies of saves behind the training fit into it.

The kernel hands out more than there is, and its OOM killer ends a rank when the copy is made. So this is asked before.
"""

import platform
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that this process can still have: what the kernel calls available, or less where a control group (of either
    version, or one around it) limits it. None where the system does not say."""
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
        # In a container the path may be the host's; the limit is at the top then.
        for group in {top, own, *(parent for parent in own.parents if parent.is_relative_to(top))}:
            yield from _left(group, *names)


def _left(group: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    limits, usage = _lines(group / limit), _lines(group / used)
    if limits and usage and limits[0] != "max":
        # Pages of files that nobody uses go when memory is asked for.
        stats = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
        yield int(limits[0]) - int(usage[0]) + int(stats.get(cache, 0))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not there, or not for us to know
        return []


def check_memory(nbytes: int, coordinator: Coordinator) -> None:
    """Raise UserError on every rank when a machine has less memory than its ranks' copies need together, of which this
    rank's has `nbytes`. Collective."""
    needed: defaultdict[str, list[int]] = defaultdict(list)
    available: dict[str, int] = {}
    for host, size, free in coordinator.gather((platform.node(), nbytes, available_memory())):
        needed[host].append(size)
        if free is not None:
            available[host] = min(free, available.get(host, free))
    for host, sizes in needed.items():
        if host in available and sum(sizes) > available[host]:
            raise UserError(
                f"checkpoint.async_save=true: saves behind the training are written from copies, for which the ranks "
                f"of {host} ({len(sizes)}) need {sum(sizes) / 2**20:.1f} MiB of memory, and "
                f"{available[host] / 2**20:.1f} MiB are available there (limits of control groups included). Set "
                "checkpoint.async_save=false, or give the machine more memory."
            )
