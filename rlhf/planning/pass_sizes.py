"""Computes samples per step and tokens per micro-batch of one rank, with samples as long as allowed."""

import math
from dataclasses import dataclass

from rlhf.config import ActorConfig, AlgorithmConfig, DataConfig, RolloutConfig
from rlhf.config.derived import generated_by_rank, longest_sample, prompts_per_generation, samples_per_step


@dataclass(frozen=True)
class PassSize:
    """Size of one rank's passes through a model: tokens of a micro-batch, and number of micro-batches."""

    tokens: int
    predicted: int
    """Tokens of a micro-batch whose log-probs are computed."""
    longest: int
    """Tokens of the longest sequence."""
    micro_batches: int
    """Micro-batches per mini-batch in an update, or per step in passes without gradients."""


def passes(samples: int, longest: int, response: int, budget: int) -> PassSize:
    """Return the size of the passes over `samples` samples on one rank, in micro-batches of at most `budget` tokens.

    Args:
        longest: tokens of a sample. A sample longer than the budget is a micro-batch of its own.
        response: tokens of a sample whose log-probs are computed.
    """
    tokens = min(max(budget, longest), max(samples, 1) * longest)
    return PassSize(tokens, tokens * response // longest, longest, max(1, math.ceil(samples * longest / tokens)))


@dataclass(frozen=True)
class StepSize:
    """Samples of a step on the busiest rank, each as long as the settings allow."""

    longest: int
    """Tokens of a prompt with its response."""
    response: int
    """Tokens of a response."""
    together: int
    """Samples that the rank requests from the engine at once."""
    scored: int
    """Samples that the rank scores."""
    trained: int
    """Samples that the rank trains on."""
    mini_batch: int
    """Samples of a mini-batch that the rank trains on."""
    tokens: int
    """Tokens of all samples of all ranks."""

    @classmethod
    def of(
        cls, data: DataConfig, rollout: RolloutConfig, actor: ActorConfig, algorithm: AlgorithmConfig, ranks: int
    ) -> "StepSize":
        at_once = prompts_per_generation(data, algorithm.filter_groups)
        return cls(
            longest_sample(data),
            data.max_response_length,
            generated_by_rank(at_once, rollout, algorithm, ranks),
            generated_by_rank(data.train_batch_size, rollout, algorithm, ranks),
            math.ceil(samples_per_step(data, rollout) / ranks),
            math.ceil(actor.ppo_mini_batch_size * rollout.n / ranks),
            samples_per_step(data, rollout) * longest_sample(data),
        )

    def whole(self, budget: int) -> PassSize:
        """Return the passes over all samples that the rank trains on."""
        return passes(self.trained, self.longest, self.response, budget)

    def update(self, budget: int) -> PassSize:
        """Return the passes over a mini-batch."""
        return passes(self.mini_batch, self.longest, self.response, budget)
