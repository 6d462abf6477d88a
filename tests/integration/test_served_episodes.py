"""Episodes on rollout servers go on at their own pace: no episode waits for another, and the journal repeats none."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf import events
from rlhf.config import RolloutConfig, ServersConfig
from rlhf.config.schema.env import EnvConfig
from rlhf.data import Prompt
from rlhf.data.turns.chat_turns import ChatTurns
from rlhf.environments.sessions import EnvironmentPool
from rlhf.experience import episodes as module
from rlhf.experience.episode import EnvironmentClass, Episode, Stage
from rlhf.experience.episodes import Asked, Episodes
from rlhf.experience.journal import Journal
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.models import tiny
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import SamplingParams
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.servers.server_engine import build_server_engine
from tests.support.launching import TINY_POLICY
from tests.support.numeric_ranks import run_ranks
from tests.support.plain_collect import tiny as tiny_policy
from tests.support.played import Crash, crash_at, facts, journal_at
from tests.support.scripted_vllm import EOS, ScriptedVllm

ENVIRONMENT = f"{Path(__file__).parents[1] / 'support' / 'logged_calls.py'}:Sums"
PROMPTS, SAMPLES, LONGEST = 3, 4, 24


@contextmanager
def player(urls: list[str], folder: Path, *, singly: bool = True) -> Iterator[Episodes]:
    """Build a player of episodes on the servers. `singly`: not in rounds."""
    config = RolloutConfig(name="vllm_server", max_num_seqs=16, servers=ServersConfig(urls=urls, max_failures=50))
    files = PolicyFiles({"config.json": (TINY_POLICY / "config.json").read_bytes()}, folder / "model", [EOS], 256)
    coordinator = Coordinator(GlooTransport())
    model, tokenizer = tiny_policy()
    actor = SimpleNamespace(full_tensors=lambda dtype: ((n, w.detach()) for n, w in model.named_parameters()))
    pool = EnvironmentPool(EnvConfig(classes=[ENVIRONMENT], timeout_s=60, max_turns=3)).start()
    engine = build_server_engine(config, files, coordinator, torch.device("cpu"), logs=folder, run_id="run")
    try:
        sampler = PolicySampler(engine, actor, seed=3, background=singly)
        chat = ChatTurns(tokenizer, (), announce=False)
        kinds = [EnvironmentClass(0, pool.definitions[0], lambda tools: chat)]
        yield Episodes(pool.config, kinds, pool, sampler, coordinator, 5, 96, tokenizer)
    finally:
        engine.close()
        pool.close()


def play(episodes: Episodes, journal: Journal | None = None) -> list[Any]:
    """Play this rank's prompts and return their facts."""
    rank, ranks = episodes.coordinator.rank, episodes.coordinator.world_size
    rows = [tiny.QUESTION.format(28 + i, "+", 35) for i in range(PROMPTS)]
    params = [SamplingParams(max_tokens=200)] * SAMPLES
    asked = [
        Asked(100 + i, Prompt(i, [{"role": "user", "content": row}], [], "sums", str(63 + i), {}), params)
        for i, row in enumerate(rows)
        if i % ranks == rank
    ]
    if journal is not None:
        journal.begin(1, 0, None)
    return facts(episodes.play(asked, version=0, step=1, journal=journal))


@pytest.fixture
def server() -> Iterator[ScriptedVllm]:
    made = ScriptedVllm(0.004, LONGEST)
    yield made
    made.close()


@pytest.fixture(scope="module")
def in_rounds(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Facts of the same episodes in rounds. A server's tokens depend only on the request."""
    made = ScriptedVllm(0.001, LONGEST)
    with player([made.url], tmp_path_factory.mktemp("rounds"), singly=False) as episodes:
        found = play(episodes)
    made.close()
    return found


def test_episodes_at_their_own_pace_have_the_tokens_of_rounds(server, in_rounds, tmp_path):
    with player([server.url], tmp_path) as episodes:
        assert play(episodes) == in_rounds
        assert play(episodes) == in_rounds
    assert len({len(fact[1]) for fact in in_rounds}) > 1


def test_no_episode_waits_for_a_longer_turn_of_another(server, in_rounds, tmp_path, monkeypatch):
    """The server holds back its first answer until all other episodes have ended."""
    held, released, generated = threading.Lock(), list[bool](), server.generated
    ended, others, take_replies = list[Episode](), threading.Event(), Episode.take_replies

    def hold(body: dict[str, Any]) -> dict[str, Any]:
        if held.acquire(blocking=False):
            released.append(others.wait(60))
        return generated(body)

    def followed(episode: Episode, replies: Any) -> None:
        take_replies(episode, replies)
        if episode.phase is Stage.DONE:
            ended.append(episode)
        if len(ended) == PROMPTS * SAMPLES - 1:
            others.set()

    monkeypatch.setattr(server, "generated", hold)
    monkeypatch.setattr(Episode, "take_replies", followed)
    with player([server.url], tmp_path) as episodes:
        assert play(episodes) == in_rounds
    assert released == [True]


@pytest.mark.parametrize("event", ["env.answered", "env.recorded", "env.turn", "journal.append"])
def test_a_crash_anywhere_changes_no_token(event, server, in_rounds, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 3)
    crashes = 0
    with player([server.url], tmp_path) as episodes:
        for nth in range(1, 100, 5):
            try:
                with crash_at(event, nth):
                    found = play(episodes, journal_at(tmp_path))
                break
            except Crash:
                crashes += 1
                episodes.sampler.stop()
        answers = len(server.answers)
        assert play(episodes, journal_at(tmp_path)) == found
    assert crashes >= 1
    assert found == in_rounds
    assert len(server.answers) == answers, "turns in the journal are not generated again"


def test_another_server_goes_on_with_the_turns_of_a_dead_one(server, in_rounds, tmp_path):
    other = ScriptedVllm(0.004, LONGEST)
    with player([server.url, other.url], tmp_path) as episodes:

        def die(event: str) -> None:
            if event == "env.turn":
                other.die()

        events.subscribe(die)
        try:
            assert play(episodes) == in_rounds
        finally:
            events._listeners.remove(die)
    other.close()


def played_on_rank(url: str, folder: Path) -> list[str]:
    with player([url], folder) as episodes:
        return [hashlib.sha256(repr(fact).encode()).hexdigest() for fact in play(episodes)]


def test_every_rank_plays_its_own_episodes(server, in_rounds, tmp_path):
    """The second rank has fewer prompts, and ends earlier."""
    first, second = run_ranks(2, partial(played_on_rank, server.url, tmp_path))
    hashes = [hashlib.sha256(repr(fact).encode()).hexdigest() for fact in in_rounds]
    assert first == hashes[:SAMPLES] + hashes[2 * SAMPLES :]
    assert second == hashes[SAMPLES : 2 * SAMPLES]
