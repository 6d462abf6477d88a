"""Generates scored groups: samples responses, computes rewards and applies the over-long penalty."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.shaping import overlong_penalty
from rlhf.config import OverlongBufferConfig
from rlhf.data import DrawnPrompt
from rlhf.errors import UserError
from rlhf.events import REWARD, announce, report
from rlhf.experience.begun import Begun, replaced
from rlhf.experience.early_scores import EarlyScores
from rlhf.experience.episode import Episode, Stage
from rlhf.experience.episode_groups import (
    check_failures,
    count,
    fail_without_baseline,
    function_rewards,
    with_environment_rewards,
    with_one_prompt,
)
from rlhf.experience.episodes import Asked, Episodes
from rlhf.experience.groups import Group
from rlhf.experience.journal import Journal
from rlhf.experience.metrics import RolloutStats
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.responses import check_scored, failed_samples, score_responses
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import Reward, RewardResult
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.engine import Quota

log = logging.getLogger(__name__)


@dataclass
class Generation:
    """Samples responses from the policy and scores them; reuses the samples and rewards in the `journal`.

    A prompt has `n` random samples and, with `greedy_baseline`, one greedy sample after them.
    """

    sampler: PolicySampler
    params: SamplingParams
    n: int
    greedy_baseline: bool
    reward: Reward
    overlong_buffer: OverlongBufferConfig
    tokenizer: PreTrainedTokenizerBase
    coordinator: Coordinator
    batch_size: int
    """Prompts of a step, over all ranks."""
    journal: Journal | None = None
    episodes: Episodes | None = None
    """Plays the samples as episodes with environments. Without environments, None: each response is one turn."""
    early: EarlyScores | None = field(default=None, init=False)
    """Scores complete groups while others are generated. None with a reward model, and with environments."""
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.reward.in_background and self.episodes is None:
            self.early = EarlyScores(self.reward, self.tokenizer, self.samples_per_prompt)

    def groups(self, drawn: Sequence[DrawnPrompt], stats: RolloutStats, *, version: int, step: int) -> list[Group]:
        """Return the scored groups of this rank's prompts, sampled by the policy after `version` steps. Collective."""
        started = time.monotonic() - self.sampler.sync_seconds  # the weight sync is timed as a phase of its own
        if self.episodes is not None:
            announce("rollout.before")
            asked = [Asked(each.uid, each.prompt, self._params()) for each in drawn]
            played = self.episodes.play(asked, version=version, step=step, journal=self.journal)
        else:
            samples = self._samples(drawn, stats, version, step)
        announce("rollout.after")
        stats.rollout_seconds += time.monotonic() - self.sampler.sync_seconds - started
        if self.episodes is not None:
            return self._scored_episodes(drawn, played, stats, version)
        return self.scored(drawn, samples, stats)

    def advance(
        self, begun: Sequence[Begun], quotas: Sequence[Quota], stats: RolloutStats, *, version: int, step: int
    ) -> list[Begun]:
        """Continue the partial samples of this rank's prompts until every quota is reached. Collective.

        The policy after `version` steps draws the new tokens. Return the prompts with all their samples.
        """

        def make(known: bool) -> list[list[Sample]]:
            # A rank whose samples are in the journal sends no requests, so its quotas would never be reached.
            wanted = [] if known or not quotas else self.continued(begun)
            reach = () if known else quotas
            listener = None if self.early is None else self.early.add
            return replaced(
                begun, self.sampler.generate_until(wanted, reach, version=version, step=step, listener=listener)
            )

        return self._in_flight(begun, stats, make)

    def stop(self, begun: Sequence[Begun], stats: RolloutStats) -> list[Begun]:
        """End the generation in the background, if there is one. Return the prompts with the tokens so far.

        Collective. The clock decides how many tokens there are, so the journal stores the tokens before any use.
        """
        made = replaced(begun, self.sampler.stop())
        return self._in_flight(begun, stats, lambda known: made)

    def continued(self, begun: Sequence[Begun]) -> list[Request]:
        """Return the requests that continue the partial samples."""
        return [
            replace(request, response=sample if len(sample) else None)
            for each in begun
            for request, sample in zip(self.requests([each.drawn]), each.samples, strict=True)
            if sample.finish_reason == "partial"
        ]

    def _in_flight(
        self, begun: Sequence[Begun], stats: RolloutStats, make: Callable[[bool], list[list[Sample]]]
    ) -> list[Begun]:
        started = time.monotonic() - self.sampler.sync_seconds
        samples = self._journaled([each.drawn.uid for each in begun], stats, make)
        announce("rollout.after")
        stats.rollout_seconds += time.monotonic() - self.sampler.sync_seconds - started
        return [Begun(each.drawn, of_prompt) for each, of_prompt in zip(begun, samples, strict=True)]

    def unbegun(self, drawn: DrawnPrompt) -> Begun:
        """Return the prompt as a prompt in flight whose samples have no token yet."""
        return Begun(drawn, [Sample.of(drawn.uid, i, [], [], "partial") for i in range(self.samples_per_prompt)])

    def _params(self) -> list[SamplingParams]:
        """Return the parameters of a prompt's samples: `n` random ones, then a greedy one if enabled."""
        greedy = replace(self.params, temperature=0.0, sampling_mask=False)
        return [self.params] * self.n + [greedy] * self.greedy_baseline

    def requests(self, drawn: Sequence[DrawnPrompt]) -> list[Request]:
        """Return the engine's requests: each prompt's random samples, then its greedy sample if enabled."""
        wanted = self._params()
        return [
            Request(each.uid, each.prompt.token_ids, params, number)
            for each in drawn
            for number, params in enumerate(wanted)
        ]

    @property
    def samples_per_prompt(self) -> int:
        return self.n + self.greedy_baseline

    def by_prompt(self, samples: list[Sample]) -> list[list[Sample]]:
        size = self.samples_per_prompt
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def fits(self, group: Group) -> bool:
        """Return whether the group's sample count and baseline fit the current settings."""
        return len(group.samples) == self.n and (group.baseline is not None) == self.greedy_baseline

    def _scored_episodes(
        self, drawn: Sequence[DrawnPrompt], played: list[list[Episode]], stats: RolloutStats, version: int
    ) -> list[Group]:
        """Score finished episodes and return the group of each prompt. Collective.

        Raises:
            UserError: more than `env.max_failed` of the samples failed, or an error of `scored`.
        """
        assert self.episodes is not None
        started, config, n = time.monotonic(), self.episodes.config, self.n
        everyone = [episode for group in played for episode in group]
        if self.greedy_baseline:
            fail_without_baseline(played, n)
        self._warn_of_rows(everyone, config.max_rows)
        try:
            check_failures(everyone, config.max_failed, self.coordinator)
        except UserError:
            # The same command must work once the environments do, so it must not find these failures in the journal.
            if self.journal is not None:
                failed = (episode for episode in everyone if episode.phase is Stage.FAILED)
                self.journal.forget_calls(call for episode in failed for call in episode.failed_calls)
            raise
        count(stats, everyone)
        functions = self._episode_results(drawn, played, stats)
        groups = []
        results = with_environment_rewards(functions, played, config.reward_weight)
        for each, episodes, of_prompt in zip(drawn, played, results, strict=True):
            prompt_ids, samples = with_one_prompt(episodes, version)
            penalties = self._penalties(samples)
            baseline = of_prompt[n].score + penalties[n] if self.greedy_baseline else None
            group = Group(each.uid, prompt_ids, samples[:n], of_prompt[:n], penalties[:n], baseline)
            stats.scores += [score for score, has_score in zip(group.scores, group.has_score, strict=True) if has_score]
            groups.append(group)
        stats.slow += self.reward.pop_timeouts()
        stats.reward_seconds += time.monotonic() - started
        return groups

    def _warn_of_rows(self, episodes: Sequence[Episode], most: int) -> None:
        """Log once if the limit of rows has ended episodes."""
        ended = sum(episode.lacks_row for episode in episodes)
        if ended and not self._warned:
            self._warned = True
            log.warning(
                "%d of this rank's %d episodes ended because the agent rewrote its history again after "
                "env.max_rows=%d rows. Raise env.max_rows, or let the agent rewrite its history less often. This is "
                "logged once; env/rows is the mean number of rows.",
                ended,
                len(episodes),
                most,
            )

    def _episode_results(
        self, drawn: Sequence[DrawnPrompt], played: list[list[Episode]], stats: RolloutStats
    ) -> list[list[RewardResult]]:
        """Return the rewards of `reward.functions`, from the journal if it has all of them. Collective."""
        known = None if self.journal is None else self.journal.results([each.uid for each in drawn])
        report(REWARD, 0, sum(map(len, played)))
        results = function_rewards(self.reward, self.tokenizer, played if known is None else [])
        results = results if known is None else known
        for of_prompt in results:
            stats.timeouts += sum(result.timeouts for result in of_prompt)
            stats.failures += sum(result.failures for result in of_prompt)
        stats.failed += failed_samples(results)
        check_scored(self.reward, stats.failed, self.coordinator, self.batch_size * self.n)
        if known is None and self.journal is not None:
            self.journal.add_results({each.uid: found for each, found in zip(drawn, results, strict=True)})
        return results

    def scored(self, drawn: Sequence[DrawnPrompt], samples: list[list[Sample]], stats: RolloutStats) -> list[Group]:
        """Score the samples and return the group of each prompt. Collective.

        Raises:
            UserError: with `reward.on_error=stop`, if the reward failed on all samples of the step on all ranks, and
                there are at least as many samples as in a batch.
        """
        started, n = time.monotonic(), self.n
        groups = []
        for each, of_prompt, results in zip(drawn, samples, self._results(drawn, samples, stats), strict=True):
            penalties = self._penalties(of_prompt)
            baseline = results[n].score + penalties[n] if self.greedy_baseline else None
            stats.timeouts += sum(result.timeouts for result in results)
            stats.failures += sum(result.failures for result in results)
            group = Group(each.uid, each.prompt.token_ids, of_prompt[:n], results[:n], penalties[:n], baseline)
            stats.scores += group.scores
            groups.append(group)
        stats.slow += self.reward.pop_timeouts()
        stats.reward_seconds += time.monotonic() - started
        return groups

    def _samples(
        self, drawn: Sequence[DrawnPrompt], stats: RolloutStats, version: int, step: int
    ) -> list[list[Sample]]:
        """Return the samples of each prompt, from the journal if it has all of them. Collective."""

        def make(known: bool) -> list[list[Sample]]:
            # Generate all of a rank's prompts or none: the bits of log-probs depend on the other sequences of a batch.
            requests = self.requests([] if known else drawn)
            if self.early is not None:
                self.early.expect(drawn, [])
            listener = None if self.early is None else self.early.add
            return self.by_prompt(self.sampler.generate(requests, version=version, step=step, listener=listener))

        return self._journaled([each.uid for each in drawn], stats, make)

    def _journaled(
        self, uids: Sequence[int], stats: RolloutStats, make: Callable[[bool], list[list[Sample]]]
    ) -> list[list[Sample]]:
        """Return the samples of each prompt, from the journal if it has all of them, otherwise from `make`. Collective.

        `make` is called on every rank or on none. Its argument is True if this rank's samples are in the journal.
        """
        known = None
        if self.journal is not None:
            self.journal.next_generation()
            known = self.journal.samples(uids)
            stats.journaled += [known is not None] * (len(uids) * self.n)
            # The weight sync is collective, so either every rank generates or none does.
            everywhere = all(self.coordinator.all_gather(known is not None))
            if known is not None and everywhere:
                return known
        announce("rollout.before")
        made = make(known is not None)
        if known is not None:
            return known
        if self.journal is not None:
            self.journal.add_samples(dict(zip(uids, made, strict=True)))
        return made

    def _results(
        self, drawn: Sequence[DrawnPrompt], samples: list[list[Sample]], stats: RolloutStats
    ) -> list[list[RewardResult]]:
        """Return the rewards of each prompt's samples, from the journal if it has all of them. Collective."""
        known = None if self.journal is None else self.journal.results([each.uid for each in drawn])
        pairs = list(zip(drawn, samples, strict=True))
        early = {} if self.early is None else {each.uid: self.early.pop(each.uid, s) for each, s in pairs}
        late = [(each.prompt, of_prompt) for each, of_prompt in pairs if known is None and early.get(each.uid) is None]
        scored = iter(score_responses(self.reward, self.tokenizer, late))
        results = [early.get(each.uid) or next(scored) for each in drawn] if known is None else known
        if self.early is not None:
            self.early.log_error()
        stats.failed += failed_samples(results)
        # Check before the journal stores the results: after the user's fix, the next start must score them again.
        check_scored(self.reward, stats.failed, self.coordinator, self.batch_size * self.n)
        if known is None and self.journal is not None:
            self.journal.add_results({each.uid: found for each, found in zip(drawn, results, strict=True)})
        return results

    def score_early(self, begun: Sequence[Begun]) -> None:
        """Begin to score the complete prompts among those in flight. Forget the rewards of all other prompts."""
        if self.early is not None:
            self.early.expect([each.drawn for each in begun], [each.samples for each in begun])

    def _penalties(self, samples: list[Sample]) -> list[float]:
        buffer = self.overlong_buffer
        if not buffer.enable:
            return [0.0] * len(samples)
        # The token limit applies to each row, so the penalty depends on a sample's longest row.
        longest = [max(row.response.written for row in sample.rows([])) for sample in samples]
        lengths = torch.tensor(longest, dtype=torch.int64)
        return overlong_penalty(lengths, self.params.max_tokens, buffer.len, buffer.penalty_factor).tolist()
