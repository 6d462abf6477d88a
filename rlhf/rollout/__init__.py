"""Rollout engines: they turn prompts into samples with the log-probs that these were drawn with.

Every process of vLLM comes through here on the way to our plugin, so this imports no engine.
"""

from rlhf.rollout.engine import AdapterEngine, BackgroundEngine, Request, RolloutEngine, SamplingParams, Weights
from rlhf.rollout.sample import Sample
