"""Measures the peak CPU memory that an action allocates, with torch's profiler."""

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of(action: Callable[[], Any], mapped: int = 0) -> int:
    """Return the peak bytes that `action` allocates on the CPU, without the mapping of a file of `mapped` bytes."""
    gc.collect()  # otherwise garbage of earlier actions would be freed, and counted, during the action
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = action()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    events = [event for event in events if abs(event.nbytes()) != mapped]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del kept
    return peak
