"""Samples of a step on one rank and tokens of a micro-batch, from the lengths that the settings allow."""

import math
from dataclasses import dataclass

from rlhf.config import ActorConfig, AlgorithmConfig, DataConfig, RolloutConfig
from rlhf.config.derived import generated_by_rank, longest_sample, prompts_per_generation, samples_per_step


@dataclass(frozen=True)
class PassSize:
    """Tokens that one rank passes through a model at a time."""

    tokens: int
    """Of a micro-batch."""
    predicted: int
    """Tokens of it whose log-probs are wanted."""
    longest: int
    """Of a sequence."""
    micro_batches: int
    """Of a mini-batch, or of the step where nothing is learned."""


def passes(samples: int, longest: int, response: int, budget: int) -> PassSize:
    """The walk over `samples` of full length on one rank, in micro-batches of at most `budget` tokens.

    Args:
        longest: tokens of a sample, of which the last `response` are predicted. One longer than the budget goes alone.
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
    """Samples that the rank asks the engine for at once."""
    scored: int
    """Samples that stay where they were generated, for the rewards and the advantages."""
    trained: int
    """Samples that the rank trains on."""
    mini_batch: int
    """Samples of them in one mini-batch."""
    tokens: int
    """Tokens of all samples of all ranks."""

    @classmethod
    def of(
        cls, data: DataConfig, rollout: RolloutConfig, actor: ActorConfig, algorithm: AlgorithmConfig, ranks: int
    ) -> "StepSize":
        """The sizes of a step that is shared by so many `ranks`."""
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
        """The walk over all samples that the rank trains on."""
        return passes(self.trained, self.longest, self.response, budget)

    def update(self, budget: int) -> PassSize:
        """The walk over a mini-batch."""
        return passes(self.mini_batch, self.longest, self.response, budget)
