"""Evaluates the policy on held-out prompts every `trainer.test_freq` steps; each rank evaluates part of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from rlhf.config import TrainerConfig
from rlhf.data import Prompt, PromptSet
from rlhf.events import announce
from rlhf.experience.episode_groups import (
    check_failures,
    function_rewards,
    whole_prompts,
    with_environment_rewards,
    with_one_prompt,
)
from rlhf.experience.episodes import Asked, Episodes
from rlhf.experience.metrics import Summary, merge
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.responses import check_scored, failed_samples, log_timeouts, score_responses, texts_of
from rlhf.experience.shown_samples import shown_answers
from rlhf.experience.validation_metrics import AnsweredPrompt, is_right, validation_metrics
from rlhf.ranks import dims
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import Reader, Reward, RewardResult
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.tracking.sample_files import ShownSample

Responses = list[tuple[Prompt, list[Sample]]]


@dataclass
class Evaluator:
    """Evaluates the policy on the held-out prompts.

    A response is right if a reward function returned `acc` = 1. Without `acc`, the first function's score must be >= 1.
    """

    prompts: PromptSet | None
    sampler: PolicySampler
    params: SamplingParams
    n: int
    """Responses to each prompt."""
    reward: Reward
    answer: Reader | None
    """Parses a response's answer for the majority vote (maj@k); None if no verifier parses answers."""
    tokenizer: PreTrainedTokenizerBase
    coordinator: Coordinator
    config: TrainerConfig
    show: Callable[[list[ShownSample]], None]
    """Called on every rank: the leader passes all samples of an evaluation, other ranks an empty list."""
    episodes: Episodes | None = None
    """Plays the samples as episodes with environments. Without environments, None: each response is one turn."""

    def before_training(self) -> dict[str, float]:
        """Return the starting policy's metrics if `trainer.val_before_train` is set, otherwise no metrics."""
        return self.evaluate(0) if self.config.val_before_train and self.prompts is not None else {}

    def maybe_evaluate(self, step: int, *, last: bool) -> dict[str, float]:
        """Return the metrics after `step` if an evaluation is due, otherwise no metrics.

        With `trainer.test_freq`, an evaluation is due at its multiples and after the last step.
        """
        test_freq = self.config.test_freq
        due = self.prompts is not None and test_freq and (last or step % test_freq == 0)
        return self.evaluate(step) if due else {}

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the policy after `step` steps. Collective.

        Return `val/accuracy`, `val/reward`, the `validation_metrics` and the seconds that the evaluation took.

        With environments, also return `val/env_failed`. All other metrics leave out prompts with a failed episode.

        Raises:
            UserError: more than `env.max_failed` of the episodes failed, or all failed; or the reward failed on all
                samples (`check_scored`).
        """
        assert self.prompts is not None
        started = time.monotonic()
        announce("evaluation.before")
        prompts = [self.prompts[i] for i in range(dims.data().rank, len(self.prompts), dims.data().size)]
        failed: dict[str, float] = {}
        if self.episodes is not None:
            responses, scored, failed["val/env_failed"] = self._played(prompts, step)
        else:
            responses, scored = self._answered(prompts, step)
        check_scored(self.reward, failed_samples(scored), self.coordinator)
        log_timeouts(f"Evaluation after step {step}", self.reward.pop_timeouts(), self.coordinator)
        self.show(shown_answers(responses, scored, self.tokenizer, self.coordinator))
        metrics = self._metrics(responses, scored) | failed
        announce("evaluation.after")
        return metrics | {"timing_s/testing": time.monotonic() - started}

    def _answered(self, prompts: list[Prompt], step: int) -> tuple[Responses, list[list[RewardResult]]]:
        n = self.n
        requests = [Request(p.index, p.token_ids, self.params, number) for p in prompts for number in range(n)]
        samples = self.sampler.generate(requests, version=step, step=step)
        responses = [(prompt, samples[i * n : (i + 1) * n]) for i, prompt in enumerate(prompts)]
        self.sampler.sleep()
        return responses, score_responses(self.reward, self.tokenizer, responses)

    def _played(self, prompts: list[Prompt], step: int) -> tuple[Responses, list[list[RewardResult]], float]:
        """Return prompts, samples and rewards of episodes, and the share of all ranks' episodes that failed.

        Leave out prompts with a failed episode.
        """
        assert self.episodes is not None
        asked = [Asked(prompt.index, prompt, [self.params] * self.n) for prompt in prompts]
        played = self.episodes.play(asked, version=step, step=step)
        self.sampler.sleep()
        config = self.episodes.config
        check_failures([episode for group in played for episode in group], config.max_failed, self.coordinator)
        whole, failed = whole_prompts(played, step, self.coordinator)
        done = [played[i] for i in whole]
        functions = function_rewards(self.reward, self.tokenizer, done)
        responses: Responses = []
        for i, group in zip(whole, done, strict=True):
            prompt_ids, samples = with_one_prompt(group, step)
            responses.append((replace(prompts[i], token_ids=prompt_ids), samples))
        return responses, with_environment_rewards(functions, done, config.reward_weight), failed

    def _metrics(
        self, responses: list[tuple[Prompt, list[Sample]]], scored: list[list[RewardResult]]
    ) -> dict[str, float]:
        answered = [
            AnsweredPrompt(prompt.data_source, results, self._answers(samples, results))
            for (prompt, samples), results in zip(responses, scored, strict=True)
        ]
        results = [result for of_prompt in scored for result in of_prompt]
        right = [is_right(result) for result in results]
        own = {"val/accuracy": Summary.of(right), "val/reward": Summary.of(r.score for r in results)}
        means = {name: summary.mean for name, summary in merge(own, self.coordinator).items()}
        return means | validation_metrics(answered, self.n, self.coordinator)

    def _answers(self, samples: list[Sample], results: list[RewardResult]) -> list[str | None]:
        """Return the answer of each response, or None for an unknown answer.

        The answer is the `pred` that a reward function returned (verl's name). Without `pred`, the verifier parses the
        answer from the text.
        """
        if len(samples) == 1:  # one response needs no majority vote
            return [None]
        if all("pred" in result.notes or "pred" in result.extra for result in results):
            return [str((result.extra | result.notes)["pred"]) for result in results]
        if self.answer is None:
            return [None] * len(samples)
        return [self.answer(text) for text in texts_of(self.tokenizer, samples)]
