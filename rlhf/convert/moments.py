"""Defines the names of AdamW's moments, and reads a run's progress from AdamW's step counts."""

from collections.abc import Mapping
from dataclasses import replace

from rlhf.models.hf.source import ReadableTensor, TrainedSoFar

MOMENTS = ("exp_avg", "exp_avg_sq")


class Unmapped(Exception):
    """The optimizer's state cannot be matched to parameters; the message gives the reason."""


def with_updates(progress: TrainedSoFar, moments: Mapping[str, ReadableTensor]) -> TrainedSoFar:
    """Return `progress` with `optimizer_steps` set to the largest step count in `moments`."""
    steps = [tensor.read(0, 1).item() for name, tensor in moments.items() if name.endswith(".step")]
    return replace(progress, optimizer_steps=int(max(steps, default=0)))
