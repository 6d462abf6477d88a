"""Rollout engines: they turn prompts into samples with the log-probs that these were drawn with."""

from typing import TYPE_CHECKING, Any

from rlhf.rollout.engine import (
    AdapterEngine,
    BackgroundEngine,
    Request,
    RolloutEngine,
    SamplingParams,
    Weights,
)
from rlhf.rollout.sample import Sample

if TYPE_CHECKING:
    from rlhf.rollout.embedded import EmbeddedEngine, build_embedded_engine, check_lengths, eos_token_ids

__all__ = [
    "AdapterEngine",
    "BackgroundEngine",
    "EmbeddedEngine",
    "Request",
    "RolloutEngine",
    "Sample",
    "SamplingParams",
    "Weights",
    "build_embedded_engine",
    "check_lengths",
    "eos_token_ids",
]


def __getattr__(name: str) -> Any:
    # It imports transformers, and every process of vLLM comes through here on the way to our plugin.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlhf.rollout import embedded

    return getattr(embedded, name)
