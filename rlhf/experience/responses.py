"""Scores responses: decodes samples, sends the texts with their prompts to the reward, and logs time-outs."""

import logging
from collections.abc import Iterable, Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from rlhf.data import Prompt
from rlhf.events import REWARD, report
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import Reward, RewardItem, RewardResult, Timeouts, merge_timeouts
from rlhf.rollout import Sample

log = logging.getLogger(__name__)


def score_responses(
    reward: Reward, tokenizer: PreTrainedTokenizerBase, answered: Iterable[tuple[Prompt, Sequence[Sample]]]
) -> list[list[RewardResult]]:
    """Return the rewards of the samples of each prompt. Collective with a reward model."""
    responses = list(answered)
    texts = iter(texts_of(tokenizer, [sample for _, samples in responses for sample in samples]))
    items = [
        RewardItem(
            prompt.data_source,
            next(texts),
            prompt.ground_truth,
            prompt.extra_info,
            prompt.messages,
            prompt.columns,
            sample.token_ids,
            group,
        )
        for group, (prompt, samples) in enumerate(responses)
        for sample in samples
    ]
    report(REWARD, 0, len(items))
    results = iter(reward.score(items))
    return [[next(results) for _ in samples] for _, samples in responses]


def texts_of(tokenizer: PreTrainedTokenizerBase, samples: Iterable[Sample]) -> list[str]:
    """Return the text of each response, without special tokens."""
    # One sample at a time: as Python integers, the tokens of a whole step would take ten times the memory. Arrays are
    # faster than lists, whose items the tokenizer checks one by one in Python.
    return [str(tokenizer.decode(sample.token_ids, skip_special_tokens=True)) for sample in samples]


def log_timeouts(when: str, own: Sequence[Timeouts], coordinator: Coordinator) -> None:
    """Log on the leader the reward functions that timed out on any rank, each with a count and a sample. Collective."""
    merged = merge_timeouts(chain.from_iterable(coordinator.all_gather(list(own))))
    if merged and coordinator.is_leader:
        log.warning("%s: %s", when, "; ".join(map(str, merged)))
