"""Samples of an engine, one after the other, of requests that are all sampled alike."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from rlhf.rollout import Request, RolloutEngine, Sample, SamplingParams


def asking(requests: Sequence[Request], params: SamplingParams) -> list[Request]:
    """The requests with these parameters."""
    return [replace(request, params=params) for request in requests]


def sampled(
    engine: RolloutEngine, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
) -> list[Sample]:
    """What the engine gives for each request with these parameters, request after request."""
    return list(chain.from_iterable(engine.generate(asking(requests, params), seed=seed, step=step)))
