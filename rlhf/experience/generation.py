"""From prompts to scored groups: samples, rewards and the over-long punishment, from the journal where it has them."""

import time
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.shaping import overlong_penalty
from rlhf.checkpoint.driver_state import DriverState
from rlhf.config import Config
from rlhf.data import Prompt
from rlhf.events import announce
from rlhf.experience.groups import Group
from rlhf.experience.journal import Journal
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import Reward, RewardItem, RewardResult
from rlhf.rollout import Job, Request, Sample, SamplingParams

T = TypeVar("T", Sample, RewardResult)


@dataclass
class RolloutStats:
    """What a generation, or all of a step, cost this rank and what it saw, used for training or not."""

    scores: list[float] = field(default_factory=list)
    journaled: list[bool] = field(default_factory=list)
    """Of each sample, whether it came from the journal."""
    timeouts: int = 0
    failures: int = 0
    rollout_seconds: float = 0.0
    reward_seconds: float = 0.0

    def add(self, other: "RolloutStats") -> None:
        """Count what `other` has, too."""
        for of_tally in fields(self):
            setattr(self, of_tally.name, getattr(self, of_tally.name) + getattr(other, of_tally.name))


@dataclass
class Generation:
    """Samples the policy and scores what it says; with a `journal` (`checkpoint.journal`) nothing that is in it is made again."""

    config: Config
    sampler: PolicySampler
    params: SamplingParams
    greedy_baseline: bool
    reward: Reward
    tokenizer: PreTrainedTokenizerBase
    coordinator: Coordinator
    driver: DriverState
    journal: Journal | None = None

    def groups(self, step: int, prompts: list[Prompt], requests: list[Request], tally: RolloutStats) -> list[Group]:
        """The scored group of each prompt of this rank. Collective."""
        started = time.monotonic()
        samples = self._samples(step, requests, tally)
        announce("rollout.after")
        tally.rollout_seconds += time.monotonic() - started
        return self._scored(prompts, requests, samples, tally)

    def begin(self, step: int, requests: list[Request]) -> None:
        """Start to generate for `step` with the present weights, and return. Collective."""
        self.sampler.begin(self._jobs(requests), version=self.driver.step, step=step)

    def finish(self, prompts: list[Prompt], requests: list[Request], tally: RolloutStats) -> list[Group]:
        """What `groups` would have returned for what `begin` started. Collective."""
        announce("rollout.before")
        started = time.monotonic()
        samples = [sample for of_job in self.sampler.finish(self.driver.step) for sample in of_job]
        announce("rollout.after")
        tally.rollout_seconds += time.monotonic() - started
        return self._scored(prompts, requests, samples, tally)

    def _scored(
        self, prompts: list[Prompt], requests: list[Request], samples: list[Sample], tally: RolloutStats
    ) -> list[Group]:
        started, n = time.monotonic(), self.params.n
        results = self._results(prompts, requests, samples)
        penalties = self._penalties(samples)
        tally.timeouts += sum(result.timeouts for result in results)
        tally.failures += sum(result.failures for result in results)
        groups = []
        for i, request in enumerate(requests):
            rows, last = slice(i * n, (i + 1) * n), n * len(requests) + i
            baseline = results[last].score + penalties[last] if self.greedy_baseline else None
            of_group = (samples[rows], results[rows], penalties[rows], baseline)
            groups.append(Group(request.uid, request.token_ids, *of_group))
        tally.scores += [score for group in groups for score in group.scores]
        tally.reward_seconds += time.monotonic() - started
        return groups

    def _samples(self, step: int, requests: list[Request], tally: RolloutStats) -> list[Sample]:
        """The samples of all requests and then, for the baseline, the greedy ones; from the journal if they are there. Collective."""
        known = None if self.journal is None else self.journal.samples([request.uid for request in requests])
        tally.journaled += [known is not None] * (len(requests) * self.params.n)
        # The weights reach the engine by a collective call: either every rank makes it or none does.
        if self.journal is not None and all(self.coordinator.gather(known is not None)):
            assert known is not None
            return self._flat(known)
        # All of a rank's requests or none: the bits of log-probs depend on what is in the batch with them.
        asked, version = requests if known is None else [], self.driver.step
        announce("rollout.before")
        samples = []
        for job in self._jobs(asked):
            samples += self.sampler.generate(*job, version=version, step=step)
        if self.journal is not None and known is None:
            self.journal.add_samples(self._by_prompt(requests, samples))
        return samples if known is None else self._flat(known)

    def _jobs(self, requests: list[Request]) -> list[Job]:
        """All samples and then, for the baseline, the greedy ones."""
        greedy = [(requests, replace(self.params, n=1, temperature=0.0))] if self.greedy_baseline else []
        return [(requests, self.params), *greedy]

    def _results(self, prompts: list[Prompt], requests: list[Request], samples: list[Sample]) -> list[RewardResult]:
        """The rewards of `_samples`' samples, in their order; from the journal if they are there. Collective."""
        known = None if self.journal is None else self.journal.results([request.uid for request in requests])
        if known is not None:
            self._score([], [])  # collective with a reward model
            return self._flat(known)
        owners = [p for p in prompts for _ in range(self.params.n)] + (prompts if self.greedy_baseline else [])
        results = self._score(owners, samples)
        if self.journal is not None:
            self.journal.add_results(self._by_prompt(requests, results))
        return results

    def _by_prompt(self, requests: list[Request], values: list[T]) -> dict[int, list[T]]:
        """What belongs to each request, by its uid: to its samples, and last to the greedy one."""
        n, greedy = self.params.n, values[self.params.n * len(requests) :]
        return {r.uid: values[i * n : (i + 1) * n] + greedy[i : i + 1] for i, r in enumerate(requests)}

    def _flat(self, by_prompt: list[list[T]]) -> list[T]:
        """`_by_prompt`'s lists in the order that they were made from."""
        n = self.params.n
        return [v for values in by_prompt for v in values[:n]] + [v for values in by_prompt for v in values[n:]]

    def _score(self, owners: list[Prompt], samples: list[Sample]) -> list[RewardResult]:
        token_ids = [s.token_ids for s in samples]
        # Of no sequences batch_decode makes one empty text.
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True) if token_ids else []
        return self.reward.score(
            [
                RewardItem(o.data_source, text, o.ground_truth, o.extra_info, o.messages)
                for o, text in zip(owners, texts, strict=True)
            ]
        )

    def _penalties(self, samples: list[Sample]) -> list[float]:
        buffer = self.config.reward.overlong_buffer
        if not buffer.enable:
            return [0.0] * len(samples)
        lengths = torch.tensor([len(s.token_ids) for s in samples], dtype=torch.int64)
        return overlong_penalty(lengths, self.params.max_tokens, buffer.len, buffer.penalty_factor).tolist()
