"""Advantages of episodes whose agents rewrote their histories, against loops over Python floats and over ranks."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batch import RolloutBatch
from rlhf.config import AlgorithmConfig, GuardsConfig
from rlhf.experience.collate import collate
from rlhf.experience.groups import Group, from_tensors, to_tensors
from rlhf.experience.metrics import step_metrics
from rlhf.learning.credit import Advantages
from rlhf.learning.guards import Guards
from rlhf.learning.resharding import SampleResharder
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from rlhf.rollout.sample import ROW
from tests.support import float_reference as reference
from tests.support.numeric_ranks import run_ranks, single_rank

N, GAMMA, LAM = 4, 0.9, 0.8
NAMES = ("grpo", "rloo", "pass_at_k", "remax", "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def random_sample(rng: random.Random, uid: int, number: int) -> Sample:
    """Return a sample of one to three rows. A row after the first begins with its history: a prompt, and observations
    beyond `data.max_prompt_length`. Each row has an observation between two turns."""
    ids: list[int] = []
    observations, forks = [], []
    for row in range(rng.choice([1, 1, 2, 3])):
        if row:
            history = rng.randint(2, 6)
            forks.append((len(ids), min(history, 4)))
            observations.append((len(ids), len(ids) + history))
            ids += [900] * history
        for turn in range(2):
            if turn:
                observations.append((len(ids), len(ids) + 2))
                ids += [800] * 2
            ids += [rng.randrange(100) for _ in range(rng.randint(1, 4))]
    log_probs, half = [-rng.random() for _ in ids], len(ids) // 2
    arrays = np.array(ids, np.int32), np.array(log_probs, np.float32)
    reason: Any = rng.choice(["stop", "length"])
    versions = ((2, half), (3, len(ids))) if half else ((3, len(ids)),)
    return Sample(uid, number, *arrays, reason, versions, tuple(observations), tuple(forks))


def groups(seed: int) -> list[Group]:
    rng, found = random.Random(seed), []
    for uid in range(3):
        samples = [random_sample(rng, uid, number) for number in range(N)]
        scores = [float(np.float32(rng.gauss(0, 1))) for _ in samples]
        results = [RewardResult(score, {"shop": score}) for score in scores]
        found.append(Group(uid, [1, 2, 3], samples, results, [0.0] * N, float(np.float32(rng.gauss(0, 1)))))
    return found


def estimate(name: str, batch: RolloutBatch, values: Any, **settings: Any) -> tuple[Any, dict[str, float]]:
    config = AlgorithmConfig(adv_estimator=name, gamma=GAMMA, lam=LAM, pass_at_k=2, **settings)
    advantages = Advantages(config, N)
    return advantages.estimate(batch, values, None, Guards(GuardsConfig()))


def values_of(batch: RolloutBatch) -> torch.Tensor:
    return torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(1))


def tokens_of(batch: RolloutBatch, values: torch.Tensor) -> list[list[float]]:
    """Return the values of each sample's sampled tokens, in the order of time."""
    assert batch.samples is not None
    found: list[list[float]] = [[] for _ in batch.scores]
    for row, sample in enumerate(batch.samples.tolist()):
        found[sample] += values[row][batch.response_mask[row]].tolist()
    return found


def expected(name: str, made: list[Group], values: list[list[float]]) -> list[list[float]]:
    """Return the advantages of each sample's sampled tokens. A sample is one trajectory with one reward at its end."""
    samples = [sample for group in made for sample in group.samples]
    scores = [score for group in made for score in group.scores]
    mask = [[1.0] * sample.written for sample in samples]
    rewards = [[0.0] * (sample.written - 1) + [score] for sample, score in zip(samples, scores, strict=True)]
    of_group = {
        "grpo": lambda group: reference.grpo(group, True),
        "rloo": reference.rloo,
        "pass_at_k": lambda group: reference.pass_at_k(group, 2, True),
        "reinforce_plus_plus_baseline": reference.subtract_group_mean,
    }
    if name == "gae":
        return reference.whiten(reference.gae(rewards, values, mask, GAMMA, LAM)[0])
    if name == "reinforce_plus_plus":
        return reference.whiten(reference.rewards_to_go(rewards, mask, GAMMA))
    if name == "remax":
        baselines = [group.baseline or 0.0 for group in made for _ in group.samples]
        togo = reference.rewards_to_go(rewards, mask, 1.0)
        return [[value - base for value in row] for row, base in zip(togo, baselines, strict=True)]
    found = reference.by_group(rewards, mask, N, of_group[name])
    return reference.whiten(found) if name == "reinforce_plus_plus_baseline" else found


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_of_an_episode_are_one_sample(name):
    for seed in range(4):
        made = groups(seed)
        batch = collate(made, 0, 3, torch.device("cpu"))
        assert len(batch) > len(batch.scores) == 3 * N
        values = values_of(batch)
        with single_rank():
            credit, _ = estimate(name, batch, values if name == "gae" else None)
        assert credit.mask is batch.response_mask
        wanted = expected(name, made, tokens_of(batch, values))
        for found, row in zip(tokens_of(batch, credit.advantages), wanted, strict=True):
            assert found == pytest.approx(row, rel=1e-5, abs=1e-5)
        assert not credit.advantages[~batch.response_mask].any()
        means = [sum(row) / len(row) for row in wanted]
        assert credit.means(batch.samples) == pytest.approx(means, rel=1e-5, abs=1e-5)


def test_each_sampled_token_is_in_one_row():
    for made in groups(0):
        batch = collate([made], 0, 3, torch.device("cpu"))
        assert batch.samples is not None
        starts = batch.prompt_lengths.tolist()
        for i, sample in enumerate(made.samples):
            rows = [row for row, owner in enumerate(batch.samples.tolist()) if owner == i]
            responses = [batch.input_ids[row, starts[row] :][: batch.response_mask.shape[1]] for row in rows]
            responses = [
                torch.nn.functional.pad(ids, (0, batch.response_mask.shape[1] - len(ids))) for ids in responses
            ]
            trained = [
                t for ids, row in zip(responses, rows, strict=True) for t in ids[batch.response_mask[row]].tolist()
            ]
            assert trained == sample.token_ids[sample.mask()].tolist()
            log_probs = [p for row in rows for p in batch.rollout_log_probs[row][batch.response_mask[row]].tolist()]
            assert log_probs == sample.log_probs[sample.mask()].tolist()
            ages = [age for row in rows for age in batch.staleness[row][batch.response_mask[row]].tolist()]
            drawn = [next(v for v, end in sample.versions if t < end) for t in range(len(sample)) if sample.mask()[t]]
            assert ages == [3 - version for version in drawn]
        pairs = list(zip(batch.uids.tolist(), batch.numbers.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)


def test_truncated_episodes_are_masked_in_all_their_rows():
    made = groups(1)
    batch = collate(made, 0, 3, torch.device("cpu"))
    with single_rank():
        credit, metrics = estimate("grpo", batch, None, mask_truncated_responses=True)
    assert batch.samples is not None
    cut = batch.truncated[batch.samples][:, None]
    assert torch.equal(credit.mask, batch.response_mask & ~cut)
    assert metrics["advantages/truncated_masked"] == pytest.approx(batch.truncated.float().mean().item())


def test_carried_groups_keep_their_forks():
    made = groups(2)
    assert from_tensors(to_tensors(made)) == made
    assert "forks" not in to_tensors([Group(0, [1], [Sample.of(0, 0, [1], [0.0], "stop")], [], [], None)])


def test_metrics_count_rows_in_lengths_and_samples_in_rewards():
    made = groups(3)
    batch = collate(made, 0, 3, torch.device("cpu"))
    metrics, tokens = step_metrics(batch, made, 100, Coordinator(GlooTransport()))
    lengths = (batch.prompt_lengths + batch.response_lengths).double()
    assert tokens.total == lengths.sum()
    assert tokens.squares == lengths.square().sum()
    assert tokens.responses == batch.response_mask.sum()
    assert metrics["response_length/mean"] == pytest.approx(batch.response_lengths.double().mean().item())
    assert metrics["reward/mean"] == pytest.approx(np.mean([score for group in made for score in group.scores]))


@pytest.mark.parametrize("seed", [None, 5])
def test_the_rows_of_a_sample_are_in_one_mini_batch(seed):
    made = groups(4)
    batch = collate(made, 0, 3, torch.device("cpu"))
    uids = [group.uid for group in made for _ in group.rows]
    with single_rank():
        resharder = SampleResharder(3, Coordinator(GlooTransport()), seed)
        training = resharder.reshard(batch, uids, 1)
        drawn = [(training.batch, training.balance)]
        if training.shuffle is not None:
            drawn.append((training.shuffle.moved(training.batch, 1), training.shuffle.deal(1)[1]))
    orders = []
    for present, balance in drawn:
        parts = [balance.rows(part, 0) for part in range(3)]
        keys = [list(zip(present.uids[rows], present.numbers[rows] % ROW, strict=True)) for rows in parts]
        samples = [{(int(uid), int(number)) for uid, number in part} for part in keys]
        assert [len(part) for part in samples] == [N, N, N]
        assert len(set.union(*samples)) == 3 * N
        if seed is None:
            assert [{uid for uid, _ in part} for part in samples] == [{0}, {1}, {2}]
        pairs = list(zip(present.uids.tolist(), present.numbers.tolist(), strict=True))
        assert sorted(pairs) == sorted(zip(batch.uids.tolist(), batch.numbers.tolist(), strict=True))
        orders.append(pairs)
    assert len(orders) == 1 or orders[0] != orders[1]


def on_a_rank() -> dict[str, Any]:
    """Return the advantages of this rank's groups. Of two ranks, only one has forked episodes."""
    coordinator = Coordinator(GlooTransport())
    plain = Group(9, [1], [Sample.of(9, i, [5, 6], [0.0, 0.0], "stop", 3) for i in range(N)], [], [], 0.0)
    for i in range(N):
        plain.results.append(RewardResult(float(i), {}))
        plain.penalties.append(0.0)
    mine = [[*groups(0)], [plain]]
    own = mine[coordinator.rank] if coordinator.world_size == 2 else [*mine[0], *mine[1]]
    batch = collate(own, 0, 3, torch.device("cpu"))
    found = {}
    for name in NAMES:
        credit, metrics = estimate(name, batch, torch.zeros(batch.response_mask.shape) if name == "gae" else None)
        found[name] = credit.advantages[batch.response_mask].tolist()
        found[f"{name} metrics"] = metrics
    return found


def test_a_rank_without_forks_meets_a_rank_with_forks():
    with single_rank():
        one = on_a_rank()
    first, second = run_ranks(2, on_a_rank)
    for name in NAMES:
        assert first[name] + second[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6)
        assert first[f"{name} metrics"] == pytest.approx(one[f"{name} metrics"], rel=1e-5, abs=1e-6)
