"""Plays episodes in rounds: one engine call generates a turn of every live episode, then their environments are called.

The time that calls take does not change a round's batch. The journal stores the turns of a round before any of their
calls, and all replies of a round, with one sync, before an episode uses any reply. A restart after a crash repeats the
rounds with the turns and replies in the journal. It generates or calls only what the journal lacks (promise 20).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.config.schema.env import EnvConfig
from rlhf.data import Prompt
from rlhf.environments.class_checks import COLUMN
from rlhf.environments.sessions import Call, EnvironmentFailed, EnvironmentPool, Reply, Session
from rlhf.events import GENERATING, announce, report
from rlhf.experience.episode import EnvironmentClass, Episode, Limits, Stage, new_part
from rlhf.experience.journal import Journal
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout import SamplingParams

Outcome = dict[str, Any]
"""Outcome of an episode's calls in a round: the environment's `replies` and `state`, or its `failure`."""


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

        If any rank needs an engine call in a round, every rank makes an engine call.
        """
        groups = [self._episodes(each) for each in asked]
        episodes = [episode for group in groups for episode in group]
        if journal is not None:
            journal.open_episodes([each.uid for each in asked])
        try:
            while True:
                self._make_calls(episodes, journal)
                live = [episode for episode in episodes if episode.phase is Stage.POLICY]
                known = [] if journal is None or not live else journal.turns([episode.key for episode in live])
                lacks = known is None or (journal is None and bool(live))
                busy = any(episode.phase not in (Stage.DONE, Stage.FAILED) for episode in episodes)
                states = self.coordinator.all_gather((busy, lacks))
                if not any(busy for busy, _ in states):
                    return groups
                if any(lacks for _, lacks in states):
                    # Generate all of a rank's live episodes or none: the bits of log-probs depend on the batch.
                    wanted = live if lacks else []
                    requests = [episode.request() for episode in wanted]
                    whole = self.sampler.generate(requests, version=version, step=step)
                    made = [new_part(sample, each.start) for each, sample in zip(requests, whole, strict=True)]
                    if journal is not None and wanted:
                        journal.add_turns({e.key: sample for e, sample in zip(wanted, made, strict=True)})
                    known = made if lacks else known
                announce("env.turn")
                for episode, sample in zip(live, known or [], strict=True):
                    episode.take_turn(sample)
                done = sum(episode.phase in (Stage.DONE, Stage.FAILED) for episode in episodes)
                report(GENERATING, done, len(episodes))
        finally:
            for episode in episodes:
                episode.session.drop()

    def _make_calls(self, episodes: Sequence[Episode], journal: Journal | None) -> None:
        """Make or look up the calls of all episodes until every episode needs the policy or is finished."""
        while waiting := [episode for episode in episodes if episode.phase is Stage.CALLS]:
            outcomes = {e.key: journal.calls(e.key, e.asked) if journal is not None else None for e in waiting}
            new = [episode for episode in waiting if outcomes[episode.key] is None]
            made = self.pool.run([partial(_outcome, episode.session, episode.calls) for episode in new])
            announce("env.answered")
            if journal is not None and new:
                named = [(e.key, e.asked) for e in new]
                journal.add_calls(dict(zip(named, made, strict=True)))
            announce("env.recorded")
            outcomes |= {episode.key: outcome for episode, outcome in zip(new, made, strict=True)}
            for episode in waiting:
                _use(episode, outcomes[episode.key] or {}, new=episode in new)

    def _episodes(self, asked: Asked) -> list[Episode]:
        prompt = asked.prompt
        kind = self.classes[0]
        if len(self.classes) > 1:
            kind = next(each for each in self.classes if each.definition.label == prompt.columns[COLUMN])
        config = self.config
        longest = self.max_prompt_length
        limits = Limits(config.max_turns, config.max_rows, config.max_invalid_calls, config.retries, longest)
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

    def close(self) -> None:
        self.pool.close()


def _row(prompt: Prompt, seed: int) -> dict[str, Any]:
    """Return the arguments of `reset`: prompt, fields and columns of the row, and a seed unless the row has one."""
    own = {"prompt": prompt.messages, "data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    return {"seed": seed} | prompt.extra_info | own | prompt.columns


def _outcome(session: Session, calls: Sequence[Call]) -> Outcome:
    """Make the calls and return their outcome. End the environment after an episode's last call or a failure."""
    try:
        replies: list[Reply] = session.make(calls)
    except EnvironmentFailed as error:
        session.drop()
        return {"failure": str(error)}
    if calls[0]["op"] == "reward":
        session.close()
    return {"replies": replies, "state": session.state}


def _use(episode: Episode, outcome: Outcome, *, new: bool) -> None:
    if "failure" in outcome:
        return episode.fail(outcome["failure"])
    if not new:
        episode.session.record(episode.calls, outcome["replies"], outcome["state"])
    return episode.take_replies(outcome["replies"])
