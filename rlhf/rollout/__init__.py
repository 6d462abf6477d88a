"""Samples responses from the current policy, with the log-prob of each token.

Every vLLM process imports this package before our plugin, so this package imports no engine.
"""

from rlhf.rollout.engine import AdapterEngine, BackgroundEngine, Request, RolloutEngine, SamplingParams, Weights
from rlhf.rollout.sample import Sample
