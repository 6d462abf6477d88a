"""Measures the time of each phase of a step on one rank, without waiting for the device, and the rank's memory."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

PREFIX = "timing_s/"
"""Prefix of the metrics with the seconds of a phase, as in verl."""
GIB = 1 << 30
STATM = Path("/proc/self/statm")


class PhaseClock:
    """Measures the seconds that this rank spends in each phase of a step.

    On CUDA the host runs ahead of the device, so the host's clock would charge a phase's kernels to the next phase that
    synchronizes. So CUDA events in the device's queue measure the time, and `collect` reads them once a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, _Mark, _Mark]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = _Mark(self._device)
        yield
        self._spans.append((name, began, _Mark(self._device)))

    def collect(self) -> dict[str, float]:
        """Return `timing_s/NAME` of each phase since the last call, in seconds.

        On CUDA, wait for the device to end the last phase. The next use of the weights would have to wait anyway.
        """
        seconds: dict[str, float] = {}
        for name, began, ended in self._spans:
            seconds[PREFIX + name] = seconds.get(PREFIX + name, 0.0) + began.seconds_until(ended)
        self._spans = []
        return seconds


class _Mark:
    """A point in a device's queue of kernels."""

    def __init__(self, device: torch.device) -> None:
        self._host = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: "_Mark") -> float:
        if self._event is None or later._event is None:
            return later._host - self._host
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1000


def memory_use(device: torch.device, statm: Path = STATM) -> dict[str, float]:
    """Return memory metrics of this process in GiB: resident host memory now (Linux), and peaks on the CUDA device."""
    used = {}
    if statm.exists():
        used["perf/host_rss_gb"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / GIB
    if device.type == "cuda":
        used["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GIB
        used["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / GIB
    return used


def largest(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each name over all ranks."""
    return {
        name: max(used[name] for used in of_ranks if name in used)
        for name in sorted({name for used in of_ranks for name in used})
    }
