"""Samples requests with equal parameters from an engine."""

from collections.abc import Sequence
from dataclasses import replace

from rlhf.rollout import Request, RolloutEngine, Sample, SamplingParams


def asking(requests: Sequence[Request], params: SamplingParams, n: int = 1) -> list[Request]:
    """Return requests for `n` samples of each prompt with `params`."""
    return [replace(request, params=params, sample=number) for request in requests for number in range(n)]


def sampled(
    engine: RolloutEngine, requests: Sequence[Request], params: SamplingParams, n: int = 1, *, seed: int, step: int
) -> list[Sample]:
    """Return `n` samples of each prompt with `params`, prompt after prompt."""
    return engine.generate(asking(requests, params, n), seed=seed, step=step)
