"""Rollout engines: prompts in, samples with the log-probs they were drawn with out."""

from rlhf.rollout.embedded import EmbeddedEngine, build_embedded_engine, check_lengths
from rlhf.rollout.types import Request, RolloutEngine, Sample, SamplingParams

__all__ = [
    "EmbeddedEngine",
    "Request",
    "RolloutEngine",
    "Sample",
    "SamplingParams",
    "build_embedded_engine",
    "check_lengths",
]
