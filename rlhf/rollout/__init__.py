"""Rollout engines: prompts in, samples with the log-probs they were drawn with out."""

from rlhf.rollout.embedded import EmbeddedEngine, build_embedded_engine, check_lengths, eos_token_ids
from rlhf.rollout.types import BackgroundEngine, Job, Request, RolloutEngine, Sample, SamplingParams, Weights

__all__ = [
    "BackgroundEngine",
    "EmbeddedEngine",
    "Job",
    "Request",
    "RolloutEngine",
    "Sample",
    "SamplingParams",
    "Weights",
    "build_embedded_engine",
    "check_lengths",
    "eos_token_ids",
]
