"""Plays episodes: an engine generates their turns, and their environments answer.

An engine in the ranks plays in rounds: one engine call generates a turn of every live episode. The calls of a complete
turn begin while the engine generates the others, if the engine reports complete turns early. The time that calls take
does not change a round's batch. On rollout servers, whose batches depend on time anyway, each episode continues at its
own pace.

The journal stores a turn before its calls, and a reply before an episode uses it. A restart after a crash repeats the
episodes with the turns and replies in the journal. It generates or calls only what the journal lacks (promise 20).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.config.schema.env import EnvConfig
from rlhf.data import Prompt
from rlhf.environments.class_checks import COLUMN
from rlhf.environments.sessions import EnvironmentPool, Session
from rlhf.events import GENERATING, announce, report
from rlhf.experience.episode import EnvironmentClass, Episode, Limits, Stage
from rlhf.experience.episode_calls import AskedTurns, EarlyTurns, EpisodeCalls, asked_turns, turns_of
from rlhf.experience.journal import Journal
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout import Sample, SamplingParams

AT_ONCE = 64
"""Most new turns, and most outcomes of calls, that a rank's episodes use between two exchanges with the servers."""


@dataclass(frozen=True)
class Asked:
    """A prompt to play: one episode for each of `params`."""

    uid: int
    prompt: Prompt
    params: Sequence[SamplingParams]


@dataclass
class Episodes:
    """Plays episodes with the environments of `env.classes`."""

    config: EnvConfig
    classes: Sequence[EnvironmentClass]
    pool: EnvironmentPool
    sampler: PolicySampler
    coordinator: Coordinator
    seed: int
    max_prompt_length: int
    tokenizer: PreTrainedTokenizerBase

    def play(
        self, asked: Sequence[Asked], *, version: int, step: int, journal: Journal | None = None
    ) -> list[list[Episode]]:
        """Return the finished episodes of each of this rank's prompts, by the policy after `version` steps. Collective.

        Raises:
            UserError: an episode begins with more than `max_prompt_length` tokens, or the chat template does not fit.
        """
        groups = [self._episodes(each) for each in asked]
        episodes = [episode for group in groups for episode in group]
        if journal is not None:
            journal.open_episodes([each.uid for each in asked])
        calls = EpisodeCalls(self.pool, journal)
        try:
            if self.sampler.background:
                self._play_singly(episodes, calls, version, step, journal)
            else:
                self._play_rounds(episodes, calls, version, step, journal)
            return groups
        finally:
            calls.drop(episodes)

    def _play_rounds(
        self, episodes: Sequence[Episode], calls: EpisodeCalls, version: int, step: int, journal: Journal | None
    ) -> None:
        """Play in rounds. If any rank needs an engine call in a round, every rank makes an engine call."""
        while True:
            calls.finish(episodes)
            live = [episode for episode in episodes if episode.phase is Stage.POLICY]
            known = [] if journal is None or not live else journal.turns([episode.key for episode in live])
            lacks = known is None or (journal is None and bool(live))
            states = self.coordinator.all_gather((_finished(episodes) < len(episodes), lacks))
            if not any(busy for busy, _ in states):
                return
            made: dict[Episode, Sample] = {}
            if any(lacks for _, lacks in states):
                # Generate all of a rank's live episodes or none: the bits of log-probs depend on the batch.
                made = self._generate(live if lacks else [], calls, version, step, journal)
            _take_turns(made if lacks else dict(zip(live, known or [], strict=True)))
            report(GENERATING, _finished(episodes), len(episodes))

    def _play_singly(
        self, episodes: Sequence[Episode], calls: EpisodeCalls, version: int, step: int, journal: Journal | None
    ) -> None:
        """Play each episode at its own pace: its next turn begins once its environment has answered.

        The engine has devices of its own, and its batches depend on time anyway, so no episode waits for another.
        """
        self.sampler.begin([], version=version, step=step)
        asked: AskedTurns = {}
        left, turned, samples = len(episodes), list(episodes), list[Sample]()
        while True:
            # Send a few turns at a time: the servers work on the first turns while the rank prepares the others.
            moved = dict.fromkeys([*turned, *calls.advance(turned, most=AT_ONCE)])
            left -= _finished(moved)
            ready = [episode for episode in moved if episode.phase is Stage.POLICY]
            known = {e: turns[0] for e in ready if journal is not None and (turns := journal.turns([e.key]))}
            new = [episode for episode in ready if episode not in known]
            requests = [episode.request() for episode in new]
            asked |= asked_turns(new, requests)
            states = self.coordinator.all_gather((left > 0, bool(samples or known) or calls.ended))
            if not any(busy for busy, _ in states):
                break
            samples += self.sampler.exchange(requests, wait=not any(waiting for _, waiting in states))
            now, samples = samples[:AT_ONCE], samples[AT_ONCE:]
            made = turns_of(now, asked)
            if journal is not None and made:
                journal.add_turns({episode.key: turn for episode, turn in made.items()})
            if turned := [*known, *made]:
                _take_turns(known | made)
                report(GENERATING, len(episodes) - left, len(episodes))
        self.sampler.stop()

    def _generate(
        self, live: Sequence[Episode], calls: EpisodeCalls, version: int, step: int, journal: Journal | None
    ) -> dict[Episode, Sample]:
        """Generate a turn of each episode, and return the turns that `EarlyTurns` has not used. Collective."""
        requests = [episode.request() for episode in live]
        asked = asked_turns(live, requests)
        early = EarlyTurns(asked, calls, journal)
        whole = self.sampler.generate(requests, version=version, step=step, listener=early.add)
        left = turns_of(whole, asked)
        if journal is not None and left:
            journal.add_turns({episode.key: turn for episode, turn in left.items()})
        return left

    def _episodes(self, asked: Asked) -> list[Episode]:
        prompt = asked.prompt
        kind = self.classes[0]
        if len(self.classes) > 1:
            kind = next(each for each in self.classes if each.definition.label == prompt.columns[COLUMN])
        config = self.config
        longest = self.max_prompt_length
        turns, rows, invalid_calls = config.max_turns, config.max_rows, config.max_invalid_calls
        limits = Limits(turns, rows, invalid_calls, config.retries, longest, self._vocabulary)
        # All samples of a prompt have the same seed, because their rewards are compared with each other.
        seed = int.from_bytes(hashlib.blake2b(f"{self.seed} {prompt.index}".encode(), digest_size=4).digest()) >> 1
        row = _row(prompt, seed)
        if kind.definition.is_agent:
            row = {"messages": prompt.messages} | row  # the data's column `prompt` may be a string
        session = partial(Session, self.pool, kind.index, seed)
        return [
            Episode(asked.uid, number, prompt, params, kind, limits, row, session)
            for number, params in enumerate(asked.params)
        ]

    @cached_property
    def _vocabulary(self) -> int:
        return 1 + max(self.tokenizer.get_vocab().values())

    def close(self) -> None:
        self.pool.close()


def _row(prompt: Prompt, seed: int) -> dict[str, Any]:
    """Return the arguments of `reset`: prompt, fields and columns of the row, and a seed unless the row has one."""
    own = {"prompt": prompt.messages, "data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    return {"seed": seed} | prompt.extra_info | own | prompt.columns


def _take_turns(turns: dict[Episode, Sample]) -> None:
    announce("env.turn")
    for episode, turn in turns.items():
        episode.take_turn(turn)


def _finished(episodes: Iterable[Episode]) -> int:
    return sum(episode.phase in (Stage.DONE, Stage.FAILED) for episode in episodes)
