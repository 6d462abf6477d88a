"""Most bytes that an action has allocated on the CPU at a time, by torch's profiler."""

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of(action: Callable[[], Any], mapped: int = 0) -> int:
    """The most bytes that `action` had allocated on the CPU at a time, but for the mapping of a file of `mapped`
    bytes."""
    gc.collect()  # what earlier actions left in cycles would be freed, and counted, in between
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
