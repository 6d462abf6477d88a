"""Reads GPUs, memory and cores of this machine from the driver and the kernel, without torch."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

QUERY_TIMEOUT_S = 10.0
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of drivers on Linux: NVIDIA's, AMD's, and Windows' (WSL). Without any, torch finds no GPU."""


def lacks_gpu() -> bool:
    """Return whether this machine has no GPU driver, without torch; False if unknown."""
    return sys.platform == "linux" and not any(Path(path).exists() for path in DRIVERS)


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that torch will find in this environment, without torch; 0 if torch is built for
    CPUs."""
    if lacks_gpu() or _built_for_cpus():
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    rows = _visible_rows(environ)
    if rows is not None and "MIG-" not in (visible or ""):
        return len(rows)
    if visible is not None:  # nvidia-smi's query lists no MIG instances
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([*Path("/dev").glob("nvidia[0-9]*")]) or 1


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
    sizes = [int(row[2]) << 20 for row in _visible_rows(environ) or [] if row[2].isdigit()]
    return min(sizes, default=None)


def _visible_rows(environ: Mapping[str, str]) -> list[list[str]] | None:
    """Return number, UUID and MiB of each GPU visible in this environment; None if nvidia-smi fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = ["--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [name.strip() for name in visible.split(",")]
        rows = [row for row in rows if row[0] in wanted or any(name and row[1].startswith(name) for name in wanted)]
    return rows if done.returncode == 0 else None


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cores() -> int:
    """Return the number of cores in this process' affinity mask, which containers and schedulers restrict."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
