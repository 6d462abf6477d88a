"""Figures of one rank: a clock of the phases of a step, without waiting for the device in between, and its memory."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

PREFIX = "timing_s/"
"""Metrics of seconds by phase, as verl names them."""
GIB = 1 << 30
STATM = Path("/proc/self/statm")


class PhaseClock:
    """Seconds that this rank spent in each phase of a step: `share`, `ref`, `old_log_prob`, `values`, `adv`,
    `update_critic`, `update_actor`.

    On CUDA the host runs ahead of the device, and its own time would count the work of one phase to the next phase
    that looks at a number. There the device's clock counts: events in its queue, which cost it nothing, are read once
    in a step by `take`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, _Mark, _Mark]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block to the phase `name`."""
        began = _Mark(self._device)
        yield
        self._spans.append((name, began, _Mark(self._device)))

    def take(self) -> dict[str, float]:
        """`timing_s/NAME` of each phase since the last call, in seconds.

        On CUDA it waits for the last phase to end on the device, as the next use of the weights would.
        """
        seconds: dict[str, float] = {}
        for name, began, ended in self._spans:
            seconds[PREFIX + name] = seconds.get(PREFIX + name, 0.0) + began.seconds_until(ended)
        self._spans = []
        return seconds


class _Mark:
    """A moment in a device's queue of work."""

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
