"""Rewards of complete groups are computed while others are generated: shown in events, with the bits of late scores."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import events
from rlhf.batch import RolloutBatch
from rlhf.config import RewardConfig, RolloutConfig, ServersConfig
from rlhf.experience.collector import Collected
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.status import SCORED, SCORES_EARLY
from rlhf.reward import Reward, RewardItem, Score, build_reward
from rlhf.reward.failures import FailurePolicy
from rlhf.reward.scores import RewardError
from rlhf.reward.weighted import Term
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.servers import server_engine
from rlhf.rollout.servers.server_engine import build_server_engine
from tests.support.checkpoints import equal_bits
from tests.support.launching import TINY_POLICY
from tests.support.numeric_ranks import run_ranks
from tests.support.plain_collect import UNFILTERED, Sums, build, new_driver
from tests.support.scripted_vllm import EOS, ScriptedVllm

DEADLINE_S, STEPS = 60.0, 3
EMBEDDED: dict[str, Any] = {"filter_groups": UNFILTERED, "rows": 8}
"""8 of 32 samples at once, so groups are complete one after the other."""
FUNCTION = "def digits(solution_str, **_):\n    return float(sum(c.isdigit() for c in solution_str))\n"


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Record events. After its first early group, the engine goes on only once a sample is scored."""
    seen, scored = list[str](), threading.Event()

    def listen(event: str) -> None:
        seen.append(event)
        if event == SCORED:
            scored.set()
        if event == SCORES_EARLY:
            assert scored.wait(DEADLINE_S), "nothing is scored while the engine generates"

    events.subscribe(listen)
    try:
        yield seen
    finally:
        events._listeners.remove(listen)


def overlaps(seen: list[str]) -> bool:
    """Whether samples are scored between begin and end of a generation."""
    starts = [i for i, event in enumerate(seen) if event == "rollout.before"]
    during = [seen[start : seen.index("rollout.after", start)] for start in starts]
    return any({SCORES_EARLY, SCORED} <= set(of_step) for of_step in during)


def processes(folder: Path) -> Reward:
    """A reward function in processes of its own."""
    (folder / "digits.py").write_text(FUNCTION)
    return build_reward(RewardConfig(functions=[f"{folder / 'digits.py'}:digits"], num_workers=2))


def in_process(scorer: Sums) -> Reward:
    return Reward([Term("sums", 2.0, scorer, FailurePolicy("sums", RewardConfig()))])


def collect(reward: Reward, *, early: bool = True, **settings: Any) -> list[Collected]:
    driver = new_driver()
    collector = build(driver, Coordinator(GlooTransport()), reward=reward, **settings)
    if not early:
        collector.generation.early = None
    found = []
    for step in range(1, STEPS + 1):
        found.append(collector.collect(step))
        driver.finish_step(found[-1].tokens.total, len(found[-1].batch), 0.0, 0.0)
    reward.close()
    return found


def bits(found: list[Collected]) -> list[Any]:
    return [{f.name: getattr(each.batch, f.name) for f in fields(RolloutBatch)} for each in found]


@pytest.mark.parametrize("async_steps", [0, 2])
def test_the_embedded_engine_generates_while_rewards_are_computed(async_steps, tmp_path):
    settings = EMBEDDED | {"async_steps": async_steps}
    with recorded() as seen:
        found = collect(processes(tmp_path), **settings)
    assert overlaps(seen)
    late = collect(processes(tmp_path), early=False, **settings)
    assert equal_bits(bits(found), bits(late))
    results = [[group.results for group in each.groups] for each in found]
    assert results == [[group.results for group in each.groups] for each in late]


def served(url: str, folder: Path) -> list[str]:
    """Return the events of this rank's steps."""
    server_engine.NEWS_S = 0.05
    config = RolloutConfig(name="vllm_server", max_num_seqs=8, servers=ServersConfig(urls=[url]))
    files = PolicyFiles({"config.json": (TINY_POLICY / "config.json").read_bytes()}, folder / "model", [EOS], 256)
    coordinator = Coordinator(GlooTransport())
    engine = build_server_engine(config, files, coordinator, torch.device("cpu"), logs=folder, run_id="run")
    try:
        with recorded() as seen:
            collect(processes(folder), engine=engine, filter_groups=UNFILTERED, longest=40)
        return seen
    finally:
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_servers_generate_while_every_rank_computes_rewards(world_size, tmp_path):
    server = ScriptedVllm(0.04, 40)
    try:
        on_rank = partial(served, server.url, tmp_path)
        ranks = [on_rank()] if world_size == 1 else run_ranks(2, on_rank)
    finally:
        server.close()
    assert all(map(overlaps, ranks))


class Counted(Sums):
    """Counts how often a response is scored. Every response that ends with 9 times out."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        self.calls.update(item.response for item in items)
        return super().score(items)


def test_what_timed_out_beside_the_generation_is_scored_again_after_it():
    early, late = Counted(), Counted()
    found, expected = collect(in_process(early), **EMBEDDED), collect(in_process(late), early=False, **EMBEDDED)
    assert equal_bits(bits(found), bits(expected))
    assert sum(each.metrics["reward/timeouts"] for each in found) > 0
    assert [each.metrics["reward/timeouts"] for each in found] == [e.metrics["reward/timeouts"] for e in expected]
    again = early.calls - late.calls
    assert any(response.endswith("9") for response in again)
    assert early.calls.keys() == late.calls.keys()


class Broken(Sums):
    """Raises always, or once."""

    def __init__(self, once: bool) -> None:
        self.once, self.calls = once, 0

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        self.calls += 1
        if self.calls > 1 and self.once:
            return super().score(items)
        raise RewardError("the function is broken")


def test_an_error_of_an_early_score_reaches_the_rank_once(caplog):
    with pytest.raises(RewardError, match="the function is broken"):
        collect(in_process(Broken(once=False)), **EMBEDDED)
    assert "the function is broken" not in caplog.text


def test_a_reward_error_that_does_not_recur_is_logged(caplog):
    collect(in_process(Broken(once=True)), **EMBEDDED)
    assert caplog.text.count("not when computed again: the function is broken") == 1
