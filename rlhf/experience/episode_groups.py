"""Converts finished episodes to samples with one prompt per group, computes their rewards, and counts them."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.events import announce
from rlhf.experience.episode import Episode, Stage, with_head
from rlhf.experience.metrics import RolloutStats
from rlhf.experience.responses import texts_of
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.status import SCORES
from rlhf.reward import Reward, RewardItem, RewardResult
from rlhf.rollout import Sample

log = logging.getLogger(__name__)

FAILURE = "environment_failure"
"""Key of a sample's note with the reason why its environment failed."""


def with_one_prompt(episodes: Sequence[Episode], version: int) -> tuple[list[int], list[Sample]]:
    """Return the prompt of the episodes of one row, and their samples.

    If `reset` returned different texts, the prompt is the tokens with which all episodes begin. The other tokens of an
    episode's prompt become an observation at the start of its sample. Failed episodes have no tokens.
    """
    prompts = [episode.prompt_ids for episode in episodes if episode.phase is Stage.DONE]
    prompt = _common(prompts) if prompts else episodes[0].prompt.token_ids
    samples = [episode.finished(version) for episode in episodes]
    heads = [e.prompt_ids[len(prompt) :] if e.phase is Stage.DONE else [] for e in episodes]
    return prompt, [with_head(sample, head) for sample, head in zip(samples, heads, strict=True)]


def _common(prompts: Sequence[list[int]]) -> list[int]:
    """Return the tokens with which all prompts begin."""
    first, last = min(prompts), max(prompts)
    end = next((i for i, token in enumerate(first) if i == len(last) or token != last[i]), len(first))
    return first[:end]


def fail_without_baseline(played: Sequence[Sequence[Episode]], n: int) -> None:
    """Mark all episodes of a prompt as failed if episode `n`, the greedy baseline, has failed.

    Without the baseline, no episode has an advantage.
    """
    for episodes in played:
        if episodes[n].phase is Stage.FAILED:
            for episode in episodes:
                if episode.phase is not Stage.FAILED:
                    episode.phase = Stage.FAILED
                    episode.failures.append(f"of the greedy baseline: {episodes[n].failures[-1]}")


def function_rewards(
    reward: Reward, tokenizer: PreTrainedTokenizerBase, played: Sequence[Sequence[Episode]]
) -> list[list[RewardResult]]:
    """Return the rewards of `reward.functions`, which read the whole conversation. Collective with a reward model.

    Failed episodes have the reward 0, which nothing reads.
    """
    scored = [(i, episode) for i, group in enumerate(played) for episode in group if episode.phase is Stage.DONE]
    samples = [episode.finished(0) for _, episode in scored]
    items = [
        RewardItem(
            e.prompt.data_source,
            text,
            e.prompt.ground_truth,
            e.prompt.extra_info,
            e.prompt.messages,
            e.prompt.columns,
            sample.token_ids,
            group,
            e.conversation,
        )
        for (group, e), text, sample in zip(scored, texts_of(tokenizer, samples), samples, strict=True)
    ]
    announce(SCORES)
    results = iter(reward.score(items))
    return [[next(results) if e.phase is Stage.DONE else RewardResult(0.0, {}) for e in group] for group in played]


def with_environment_rewards(
    results: Sequence[Sequence[RewardResult]], played: Sequence[Sequence[Episode]], weight: float
) -> list[list[RewardResult]]:
    """Add each environment's reward: the sum over its turns and `get_reward`. Note why failed episodes failed."""
    return [
        [_with_environment(result, e, weight) for result, e in zip(of_prompt, group, strict=True)]
        for of_prompt, group in zip(results, played, strict=True)
    ]


def _with_environment(result: RewardResult, episode: Episode, weight: float) -> RewardResult:
    if episode.phase is Stage.FAILED:
        return RewardResult(0.0, {}, notes={FAILURE: episode.failures[-1]})
    own, label = sum(episode.rewards), episode.kind.definition.label
    return replace(result, score=result.score + weight * own, terms=result.terms | {label: own})


def count(stats: RolloutStats, episodes: Sequence[Episode]) -> None:
    """Add the counts of the episodes to `stats`."""
    done = [episode for episode in episodes if episode.phase is Stage.DONE]
    stats.turns += [episode.turn for episode in done]
    stats.rows += [episode.rows for episode in done if episode.kind.definition.is_agent]
    stats.tool_calls += [episode.tool_calls for episode in done]
    stats.invalid_calls += [episode.invalid_calls for episode in done]
    stats.env_failures += [len(episode.failures) for episode in episodes]
    stats.env_failed += [episode.phase is Stage.FAILED for episode in episodes]


def check_failures(episodes: Sequence[Episode], most: float, coordinator: Coordinator) -> None:
    """Raise UserError if more than the fraction `most` of all ranks' episodes failed, or all failed. Collective."""
    failed = [episode for episode in episodes if episode.phase is Stage.FAILED]
    own = len(episodes), len(failed), failed[-1].failures[-1] if failed else ""
    totals, counts, texts = zip(*coordinator.all_gather(own), strict=True)
    all_failed = sum(counts) == sum(totals)
    if sum(counts) and (sum(counts) > most * sum(totals) or all_failed):
        raise UserError(
            f"The environments of {sum(counts)} of {sum(totals)} samples failed. At most env.max_failed={most:g} "
            "of them may fail, and never all. "
            f"The last failure: {next(filter(None, texts))}\nCorrect the environment, or raise env.timeout_s if it is "
            f"slow{'' if all_failed else ', or env.max_failed'}."
        )


def whole_prompts(played: Sequence[Sequence[Episode]], step: int, coordinator: Coordinator) -> tuple[list[int], float]:
    """Return the indices of this rank's held-out prompts without a failed episode, and the share of failed episodes.

    Collective. The share is over all ranks. The leader logs how many prompts the evaluation leaves out: the remaining
    prompts are not a random selection, so the means of two evaluations may differ for this reason alone. If no prompt
    remains, `val/env_failed` is the only metric. This is no error, because the failures are within `env.max_failed`.
    """
    whole = [i for i, group in enumerate(played) if all(episode.phase is Stage.DONE for episode in group)]
    episodes = [episode for group in played for episode in group]
    failures = [episode.failures[-1] for episode in episodes if episode.phase is Stage.FAILED]
    own = len(played), len(whole), len(episodes), len(failures), failures[-1] if failures else ""
    prompts, left, samples, failed, texts = zip(*coordinator.all_gather(own), strict=True)
    share = sum(failed) / sum(samples)
    if sum(failed) and coordinator.is_leader:
        log.warning(
            "Evaluation after step %d: left out %d of %d prompts, because each has a failed sample "
            "(val/env_failed=%.3g). The last failure: %s",
            step,
            sum(prompts) - sum(left),
            sum(prompts),
            share,
            next(filter(None, texts)),
        )
    return whole, share
