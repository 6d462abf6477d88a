"""Memory that a rank uses, on its host and on its device."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

GIB = 1 << 30
STATM = Path("/proc/self/statm")


def memory_use(device: torch.device, statm: Path = STATM) -> dict[str, float]:
    """GiB of this process: resident on the host now (where the system says so) and, on CUDA, the most that tensors
    took of the device (`allocated`) and that PyTorch kept of it for them (`reserved`), since its start."""
    used = {}
    if statm.exists():
        used["perf/host_rss_gb"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / GIB
    if device.type == "cuda":
        used["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GIB
        used["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / GIB
    return used


def largest(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest value of each name."""
    return {
        name: max(used[name] for used in of_ranks if name in used)
        for name in sorted({name for used in of_ranks for name in used})
    }
