"""Checks host memory, shared memory and the limit of open files."""

import resource
from collections.abc import Iterator
from pathlib import Path

from rlhf.config import Config
from rlhf.diagnosis.check_result import Outcome, counted, error, ok, warning
from rlhf.planning.check import check_snapshots
from rlhf.planning.devices import machine_memory
from rlhf.planning.memory_plan import Plan
from rlhf.planning.plan_text import gib
from rlhf.ranks.memory_folder import free_bytes
from rlhf.reward.confinement import MAX_OPEN_FILES

SHARED_MEMORY = Path("/dev/shm")
SHARED_FOR_NCCL = 1 << 30
"""Bytes of /dev/shm for NCCL and vLLM with several GPUs. Docker's default of 64 MiB is too small."""
CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, in cgroups of version 2 and 1."""
FEWEST_FILES = 1024
"""With a lower limit of open files, a rank may fail: it opens connections to peers and servers, and model shards."""


def memory_limit() -> int:
    """Return the bytes of memory that this machine, or the container around this process, has."""
    limits = [int(text) for path in CGROUPS if path.exists() and (text := path.read_text().strip()).isdigit()]
    return min([machine_memory(), *limits])


def available_memory() -> int:
    """Return the bytes of memory that processes can allocate without swapping. Linux only."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def check_host_memory(plan: Plan | None, ranks: int) -> Iterator[Outcome]:
    """Check this node's memory against the plan of its `ranks` ranks."""
    total, available = memory_limit(), available_memory()
    if plan is None:
        yield ok(f"{gib(total)}, {gib(available)} available; the run's need is unknown")
        return
    of_rank = sum(plan.host.values()) if plan.target.cuda else plan.peak.total
    found = list(host_problems(of_rank * ranks, total, min(total, available)))
    yield from found
    if not found:
        yield ok(f"{gib(of_rank * ranks)} of {gib(total)} for {counted(ranks, 'rank')}, {gib(available)} available")


def host_problems(needed: int, total: int, available: int) -> Iterator[Outcome]:
    """Yield a finding if `needed` bytes are more than the node's memory, or more than its processes leave free."""
    if needed > total:
        yield error(
            f"the ranks need {gib(needed)}, and this node has {gib(total)}. Start fewer ranks per node (trainer.nproc) "
            "on more nodes, or raise the container's memory limit. python -m rlhf.plan shows the parts."
        )
    elif needed > available:
        yield warning(f"the ranks need {gib(needed)}, and {gib(available)} are available. End other processes.")


def check_shared_memory(config: Config, plan: Plan | None, gpus: int) -> Iterator[Outcome]:
    """Check /dev/shm for NCCL and vLLM, and the tmpfs of `checkpoint.memory.dir` for snapshots."""
    if plan is not None:
        check_snapshots(config, plan)  # raises UserError
    free = free_bytes(SHARED_MEMORY)
    if free is not None and gpus > 1 and free < SHARED_FOR_NCCL:
        yield error(
            f"{SHARED_MEMORY} has {gib(free)} free, and NCCL and vLLM need {gib(SHARED_FOR_NCCL)}. Remove files there, "
            "or enlarge it: docker --shm-size=8g, on Kubernetes an emptyDir with medium Memory."
        )
    else:
        room = "no limit" if free is None else f"{gib(free)} free"
        snapshots = (
            "" if config.checkpoint.memory.freq == 0 else f"; room for snapshots in {config.checkpoint.memory.dir}"
        )
        yield ok(f"{SHARED_MEMORY}: {room}{snapshots}")


def check_open_files() -> Iterator[Outcome]:
    """Check the hard limit of open files. The trainer raises the soft limit to the hard limit."""
    yield open_files_outcome(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def open_files_outcome(limit: int) -> Outcome:
    remedy = "Raise it: ulimit -Hn 65536, or LimitNOFILE of the service that starts the run."
    if limit == resource.RLIM_INFINITY or limit >= MAX_OPEN_FILES:
        return ok(f"at most {'any number of' if limit == resource.RLIM_INFINITY else f'{limit:,}'} open files")
    level = error if limit < FEWEST_FILES else warning
    return level(f"at most {limit:,} open files, and a rank may need {MAX_OPEN_FILES:,}. {remedy}")
