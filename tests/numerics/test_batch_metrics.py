"""Compares metrics of token ages, rewards and environments over one and two ranks with NumPy over all samples."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.experience.collate import collate
from rlhf.experience.episode import Stage
from rlhf.experience.episode_groups import count, with_environment_rewards
from rlhf.experience.groups import Group
from rlhf.experience.metrics import RolloutStats, generation_metrics, step_metrics
from rlhf.experience.partial_rollouts import partial_metrics, quantile
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from tests.support.numeric_ranks import run_ranks, single_rank

VERSION, N, WEIGHT, SEEDS = 6, 4, 0.5, range(5)
KIND: Any = SimpleNamespace(definition=SimpleNamespace(label="shop", is_agent=True))


def random_step(seed: int) -> list[tuple[Group, list[Any]]]:
    """Return groups with their episodes: samples of up to four versions, with observations and failures."""
    rng, found = random.Random(seed), []
    for uid in range(6):
        samples, episodes, results = [], [], []
        for number in range(N):
            failed, length = rng.random() < 0.2, rng.randint(4, 30)
            versions, observed = ((rng.randint(2, VERSION), 0),), ()
            if not failed:
                cuts = sorted(rng.sample(range(1, length), 3))
                drawn_by = sorted(rng.choices(range(2, VERSION + 1), k=4))
                versions, observed = tuple(zip(drawn_by, [*cuts, length], strict=True)), ((cuts[0], cuts[1]),)
            ids = np.arange(0 if failed else length, dtype=np.int32)
            reason = "failed" if failed else "stop"
            samples.append(Sample(uid, number, ids, ids.astype(np.float32), reason, versions, observed))
            turns = rng.randint(1, 5)
            episode = SimpleNamespace(
                phase=Stage.FAILED if failed else Stage.DONE,
                rewards=[rng.gauss(0, 1) for _ in range(turns + 1)],  # a reward for each turn, and the final reward
                turn=turns,
                rows=rng.randint(1, turns),
                tool_calls=rng.randint(0, 9),
                invalid_calls=rng.randint(0, 3),
                failures=["error"] * (rng.randint(0, 2) + failed),
                kind=KIND,
            )
            episodes.append(episode)
            score = 0.0 if failed else rng.gauss(0, 1)
            results.append(RewardResult(score, {} if failed else {"function": score}))
        [scored] = with_environment_rewards([results], [episodes], WEIGHT)
        if failed:  # as if the prompt's greedy episode failed after this one had been scored
            scored[-1] = RewardResult(9.0, {"shop": 9.0})
        found.append((Group(uid, [1, 2], samples, scored, [0.0] * N, None), episodes))
    return found


def on_a_rank() -> dict[str, dict[str, float]]:
    coordinator, found = Coordinator(GlooTransport()), {}
    for seed in SEEDS:
        mine = [each for each in random_step(seed) if each[0].uid % 3 % coordinator.world_size == coordinator.rank]
        groups, stats = [group for group, _ in mine], RolloutStats()
        count(stats, [episode for _, episodes in mine for episode in episodes])
        source: Any = SimpleNamespace(partial_samples=2, pop_expired=lambda: 1)
        metrics = partial_metrics(source, groups, coordinator, version=VERSION)
        metrics |= step_metrics(collate(groups, 0, VERSION, torch.device("cpu")), groups, 30, coordinator)[0]
        settings: dict[str, Any] = {"journal_bytes": None, "overlong": False, "staleness": False, "generated": False}
        metrics |= generation_metrics(groups, stats, coordinator, version=VERSION, **settings)
        found[str(seed)] = metrics
    return found


def expected(seed: int) -> dict[str, float]:
    step = random_step(seed)
    pairs = [pair for group, episodes in step for pair in zip(group.samples, episodes, strict=True)]
    ages, rewards, own = [], [], []
    done = [episode for _, episode in pairs if episode.phase is Stage.DONE]
    for group, episodes in step:
        for sample, episode, result in zip(group.samples, episodes, group.results, strict=True):
            for t in range(len(sample)):
                if not any(start <= t < end for start, end in sample.observations):
                    ages.append(VERSION - next(version for version, end in sample.versions if t < end))
            if episode.phase is Stage.DONE:
                own.append(float(np.sum(episode.rewards)))
                rewards.append(result.terms["function"] + WEIGHT * own[-1])
    return {
        "sampling/token_staleness_p50": float(np.quantile(ages, 0.5, method="inverted_cdf")),
        "sampling/token_staleness_p95": float(np.quantile(ages, 0.95, method="inverted_cdf")),
        "sampling/token_staleness_max": max(ages),
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/shop": float(np.mean(own)),
        "env/turns": float(np.mean([episode.turn for episode in done])),
        "env/rows": float(np.mean([episode.rows for episode in done])),
        "env/tool_calls": float(np.mean([episode.tool_calls for episode in done])),
        "env/invalid_calls": float(np.mean([episode.invalid_calls for episode in done])),
        "env/failed": 1 - len(done) / len(pairs),
        "perf/env_failures": sum(len(episode.failures) for _, episode in pairs),
    }


def test_metrics_over_one_and_two_ranks():
    with single_rank():
        one = on_a_rank()
    first, second = run_ranks(2, on_a_rank)
    for seed in SEEDS:
        wanted = expected(seed)
        assert wanted["env/failed"] > 0
        for found in (one, first, second):
            # Scores of a batch are float32.
            assert {name: found[str(seed)][name] for name in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-6)
        assert (one[str(seed)]["sampling/partial_samples"], first[str(seed)]["sampling/partial_samples"]) == (2, 4)
        assert first[str(seed)]["sampling/prompts_expired"] == 2


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_quantile_is_the_inverse_of_the_distribution(share):
    """The count is exact: the smallest 95 % of 20 k values are 19 k values, for every k."""
    for total in range(1, 3000):
        needed = -(-total * round(share * 100) // 100)
        assert quantile({0: needed, 1: total - needed}, share) == 0
        assert quantile({0: needed - 1, 1: total - needed + 1}, share) == 1
