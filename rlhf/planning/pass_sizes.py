"""Tokens of a step and of a micro-batch, from the lengths that the settings allow."""

import math
from dataclasses import dataclass

from rlhf.config import Config


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


def longest_sample(config: Config) -> int:
    """Tokens of a prompt with its response."""
    return config.data.max_prompt_length + config.data.max_response_length


def samples_of_rank(config: Config, ranks: int, *, mini_batch: bool = False) -> int:
    """Samples of a step, or of one mini-batch, that one rank has."""
    prompts = config.actor.ppo_mini_batch_size if mini_batch else config.data.train_batch_size
    return math.ceil(prompts * config.rollout.n / ranks)


def tokens_of_step(config: Config) -> int:
    """Tokens of all samples of a step, each of full length."""
    return config.data.train_batch_size * config.rollout.n * longest_sample(config)


def generated_together(config: Config, ranks: int) -> int:
    """Samples that one rank asks the engine for at once."""
    prompts = config.data.train_batch_size
    if config.algorithm.filter_groups.enable:
        prompts = config.data.gen_batch_size or prompts
    return math.ceil(prompts * config.rollout.n / ranks)


def passes(samples: int, longest: int, response: int, budget: int) -> PassSize:
    """The walk over `samples` of full length on one rank, in micro-batches of at most `budget` tokens.

    Args:
        longest: tokens of a sample, of which the last `response` are predicted. One longer than the budget goes alone.
    """
    tokens = min(max(budget, longest), max(samples, 1) * longest)
    return PassSize(tokens, tokens * response // longest, longest, max(1, math.ceil(samples * longest / tokens)))
