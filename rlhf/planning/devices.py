"""Devices of this machine, memory and cores, without torch: what the driver says of GPUs, the kernel of the machine."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PATIENCE_S = 10.0
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Devices without which there is no GPU for torch on Linux: NVIDIA's, AMD's, and that of Windows."""


def lacks_gpu() -> bool:
    """Whether this machine has no driver of a GPU, told without torch; False where that cannot be known."""
    return sys.platform == "linux" and not any(Path(path).exists() for path in DRIVERS)


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that torch will find in this environment, told without it; 0 where it is built for CPUs."""
    if lacks_gpu() or _built_for_cpus():
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    rows = _visible_rows(environ)
    if rows is not None and "MIG-" not in (visible or ""):
        return len(rows)
    if visible is not None:  # the program lists no parts of a GPU
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([*Path("/dev").glob("nvidia[0-9]*")]) or 1


def _built_for_cpus() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


@lru_cache
def gpu_memory() -> int | None:
    """Bytes of the smallest GPU that this process may use; None where the NVIDIA driver does not say."""
    return smallest_gpu(os.environ)


def smallest_gpu(environ: Mapping[str, str]) -> int | None:
    """The same in another environment, asked anew."""
    sizes = [int(row[2]) << 20 for row in _visible_rows(environ) or [] if row[2].isdigit()]
    return min(sizes, default=None)


def _visible_rows(environ: Mapping[str, str]) -> list[list[str]] | None:
    """Number, UUID and MiB of each GPU that a process with this environment may use; None if the driver's program does
    not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = ["--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [name.strip() for name in visible.split(",")]
        rows = [row for row in rows if row[0] in wanted or any(name and row[1].startswith(name) for name in wanted)]
    return rows if done.returncode == 0 else None


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cores() -> int:
    """Cores that this process may use; containers and schedulers restrict them with the affinity mask."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
