"""Reads GPUs, memory and cores of this machine from the driver and the kernel, without torch."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlhf.config.schema.trainer import TrainerConfig

QUERY_TIMEOUT_S = 10.0
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of drivers on Linux: NVIDIA's, AMD's, and Windows' (WSL). Without any, torch finds no GPU."""


def lacks_gpu() -> bool:
    """Return whether this machine has no GPU driver, without torch; False if unknown."""
    return sys.platform == "linux" and not any(Path(path).exists() for path in DRIVERS)


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that torch will find in this environment; 0 if torch is built for CPUs.

    This function does not import torch.
    """
    if lacks_gpu() or _built_for_cpus():
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    rows = visible_gpus((), environ)
    if rows is not None and "MIG-" not in (visible or ""):
        return len(rows)
    if visible is not None:  # nvidia-smi's query lists no MIG instances
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([*Path("/dev").glob("nvidia[0-9]*")]) or 1


def devices_problem(trainer: TrainerConfig, count: int) -> str | None:
    """Return why `count` CUDA devices do not suffice for the ranks of this machine, with the remedy; None if they do.

    Each rank needs a device of its own unless trainer.device is cpu.
    """
    if trainer.device == "cpu":
        return None
    if count == 0:
        if trainer.device == "auto" and not count_gpus():
            return None
        # With device=auto, too: the driver sees GPUs, so settings may have their GPU defaults.
        return (
            f"trainer.device={trainer.device}, but no CUDA device is visible. Set trainer.device=cpu, or check "
            "`nvidia-smi`."
        )
    if trainer.ranks > count:
        return (
            f"trainer.nproc={trainer.ranks}, but only {count} CUDA devices are visible, and each rank needs its own. "
            f"Set trainer.nproc={count} or fewer, or trainer.device=cpu."
        )
    return None


def _built_for_cpus() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


@lru_cache
def gpu_memory() -> int | None:
    """Return the bytes of the smallest GPU that this process may use; None if nvidia-smi does not report it."""
    return smallest_gpu(os.environ)


def smallest_gpu(environ: Mapping[str, str]) -> int | None:
    """Return the bytes of the smallest GPU that is visible with `environ`; None if nvidia-smi does not report it."""
    sizes = [int(row[0]) << 20 for row in visible_gpus((), environ) or [] if row[0].isdigit()]
    return min(sizes, default=None)


def visible_gpus(fields: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[list[str]] | None:
    """Return the memory in MiB and the nvidia-smi `fields` of each visible GPU; None if nvidia-smi fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [f"--query-gpu={','.join(('index', 'uuid', 'memory.total', *fields))}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 3 + len(fields)]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [name.strip() for name in visible.split(",")]
        rows = [row for row in rows if row[0] in wanted or any(name and row[1].startswith(name) for name in wanted)]
    return [row[2:] for row in rows] if done.returncode == 0 else None


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cores() -> int:
    """Return the number of cores in this process' affinity mask, which containers and schedulers restrict."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
