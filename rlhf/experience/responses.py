"""Scores responses: decodes samples, passes the texts with their prompts to the reward, and logs time-outs."""

import logging
from collections.abc import Iterable, Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from rlhf.data import Prompt
from rlhf.errors import UserError
from rlhf.events import REWARD, announce, report
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.status import SCORES
from rlhf.reward import Reward, RewardItem, RewardResult, Timeouts, merge_timeouts
from rlhf.rollout import Sample

log = logging.getLogger(__name__)


def score_responses(
    reward: Reward, tokenizer: PreTrainedTokenizerBase, answered: Iterable[tuple[Prompt, Sequence[Sample]]]
) -> list[list[RewardResult]]:
    """Return the rewards of the samples of each prompt. Collective with a reward model."""
    responses = list(answered)
    items = items_of(tokenizer, responses)
    report(REWARD, 0, len(items))
    announce(SCORES)
    results = iter(reward.score(items))
    return [[next(results) for _ in samples] for _, samples in responses]


def items_of(
    tokenizer: PreTrainedTokenizerBase, answered: Sequence[tuple[Prompt, Sequence[Sample]]]
) -> list[RewardItem]:
    """Return what the reward reads of each sample. The prompts' samples form the groups."""
    texts = iter(texts_of(tokenizer, [sample for _, samples in answered for sample in samples]))
    return [
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
        for group, (prompt, samples) in enumerate(answered)
        for sample in samples
    ]


def texts_of(tokenizer: PreTrainedTokenizerBase, samples: Iterable[Sample]) -> list[str]:
    """Return the text of each response, without special tokens."""
    # Decode one sample at a time: as Python integers, the tokens of a whole step would take ten times the memory. Pass
    # arrays, because the tokenizer checks the items of a list one by one in Python.
    return [str(tokenizer.decode(sample.token_ids, skip_special_tokens=True)) for sample in samples]


def failed_samples(results: Iterable[Sequence[RewardResult]]) -> list[bool]:
    """Return whether the reward failed or timed out on each sample."""
    return [bool(result.failures or result.timeouts) for of_prompt in results for result in of_prompt]


def check_scored(reward: Reward, failed: Sequence[bool], coordinator: Coordinator, least: int = 1) -> None:
    """Raise UserError if the reward failed on all samples of all ranks, at least `least` in number. Collective.

    `failed` has an entry for each sample of this rank. Do nothing with `reward.on_error=score`.
    """
    if not reward.stops:
        return
    own = len(failed), sum(failed), reward.last_failures if failed and all(failed) else []
    counts, failures, texts = zip(*coordinator.all_gather(own), strict=True)
    if sum(counts) >= least and sum(counts) == sum(failures):
        last = next(filter(None, texts), ["unknown, before a restart"])
        raise UserError(
            f"reward.functions failed or timed out on all {sum(counts)} samples, and reward.on_error=stop ends the "
            f"run, which would learn nothing. The last failure: {'; '.join(last)}\n"
            "Correct the function, or raise reward.timeout_s if it is slow. To continue with reward.failed_score for "
            "such samples, set reward.on_error=score."
        )


def log_timeouts(when: str, own: Sequence[Timeouts], coordinator: Coordinator) -> None:
    """Log on the leader the reward functions that timed out on any rank, each with a count and a sample. Collective."""
    merged = merge_timeouts(chain.from_iterable(coordinator.all_gather(list(own))))
    if merged and coordinator.is_leader:
        log.warning("%s: %s", when, "; ".join(map(str, merged)))
