"""Defines the names of AdamW's moments, and reads a run's progress from AdamW's step counts."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rlhf.models.hf.source import ReadableTensor, TrainedSoFar
from rlhf.storage.disk_errors import DamagedCheckpoint

MOMENTS = ("exp_avg", "exp_avg_sq")


class Unmapped(Exception):
    """The optimizer's state cannot be matched to parameters; the message gives the reason."""


def with_updates(progress: TrainedSoFar, moments: Mapping[str, ReadableTensor]) -> TrainedSoFar:
    """Return `progress` with `optimizer_steps` set to the largest step count in `moments`."""
    steps = [tensor.read(0, 1).item() for name, tensor in moments.items() if name.endswith(".step")]
    return replace(progress, optimizer_steps=largest_count(steps))


def largest_count(steps: Iterable[float]) -> int:
    """Return the largest of AdamW's step counts, 0 without counts. Raise DamagedCheckpoint for an impossible count."""
    largest = 0
    for step in steps:
        if not 0 <= step < 1 << 53:
            raise DamagedCheckpoint(f"the optimizer's state has the step count {step:g}. Copy the files again.")
        largest = max(largest, int(step))
    return largest
