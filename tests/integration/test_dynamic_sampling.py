"""The collector with the real engine and real ranks: each step equals that of `plain_way`, also after a restart."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.experience.groups import Group, to_tensors
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from rlhf.tracking.history import MACHINE_METRICS
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import run_ranks
from tests.support.plain_collect import (
    BATCH,
    DEFAULTS,
    FILTERED,
    OVERLONG,
    UNFILTERED,
    WEIGHT,
    N,
    build,
    new_driver,
    plain_way,
    tensors_of_ranks,
)
from tests.support.rounding import FLOAT32

# Number of steps, settings, and the step after which all objects are rebuilt from the state in a checkpoint.
SCENARIOS: dict[str, tuple[int, dict[str, Any], int | None]] = {
    "refilled": (4, {}, None),
    "restarted": (4, {"drawn": 48}, 1),
    "older than a step": (4, {"drawn": 48, "max_staleness": 2}, 2),
    "nothing is carried over": (2, {"drawn": 24, "max_staleness": 0}, None),
    "a rank without prompts": (1, {"drawn": 1, "filter_groups": replace(FILTERED, max_num_gen_batches=14)}, None),
    "greedy baseline": (2, {"filter_groups": UNFILTERED, "greedy": True, "overlong": OVERLONG}, None),
    "greedy baseline, refilled": (2, {"greedy": True, "drawn": 28}, 1),
    "lengths make the difference": (
        2,
        {"filter_groups": replace(FILTERED, metric="seq_reward"), "overlong": OVERLONG, "answers": False},
        None,
    ),
    "nothing makes a difference": (
        2,
        {"filter_groups": replace(FILTERED, max_num_gen_batches=2), "overlong": OVERLONG, "answers": False},
        None,
    ),
    "filled in part": (2, {"filter_groups": replace(FILTERED, max_num_gen_batches=2)}, None),
}
HIGHEST = WEIGHT * 1.5
"""Upper bound of a score. Metrics are means of scores, which are kept in float32."""
REJECTED: dict[str, dict[str, Any]] = {
    "stop": {"filter_groups": replace(FILTERED, max_num_gen_batches=1, on_limit="stop"), "answers": False},
    "fill": {"filter_groups": replace(FILTERED, max_num_gen_batches=1)},
}


def walk(steps: int, settings: dict[str, Any], restart_after: int | None) -> list[dict[str, Any]]:
    """Return this rank's groups and metrics of each step. In a restart the last rank receives all groups."""
    driver, coordinator, records = new_driver(), Coordinator(GlooTransport()), []
    collector = build(driver, coordinator, **settings)
    for step in range(1, steps + 1):
        collected = collector.collect(step)
        batch = collected.batch
        driver.finish_step(collected.tokens.total, len(batch), 0.0, collected.epochs)
        prompts, responses = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
        columns = {
            "prompt": [ids[:p] for ids, p in zip(batch.input_ids.tolist(), prompts, strict=True)],
            "responses": [
                ids[p : p + r] for ids, p, r in zip(batch.input_ids.tolist(), prompts, responses, strict=True)
            ],
            "log_probs": [values[:r] for values, r in zip(batch.rollout_log_probs.tolist(), responses, strict=True)],
            "scores": batch.scores.tolist(),
            "baseline": [None] * len(batch) if batch.baselines is None else batch.baselines.tolist(),
        }
        groups = [{name: v[i : i + N] for name, v in columns.items()} for i in range(0, len(batch), N)]
        records.append({"groups": groups, "metrics": collected.metrics, "tokens": collected.tokens.total})
        if step == restart_after:
            parts, position = tensors_of_ranks(collector, coordinator), collector.prompts.position
            collector = build(driver, coordinator, **settings)
            collector.load_tensors(parts if coordinator.rank == coordinator.world_size - 1 else [])
            collector.prompts.advance_to(position)
    return records


def error_message(settings: dict[str, Any]) -> str:
    try:
        walk(1, settings, None)
    except UserError as error:
        return str(error)
    return "not refused"


@in_float64()
def all_scenarios() -> dict[str, Any]:
    """Return the results of all scenarios on this rank."""
    records: dict[str, Any] = {name: walk(*scenario) for name, scenario in SCENARIOS.items()}
    return records | {name: error_message(settings) for name, settings in REJECTED.items()}


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict[str, Any]]]:
    """The results of each rank, in runs on 1 and on 3 ranks. The batch size is not divisible by 3."""
    return {1: [all_scenarios()], 3: run_ranks(3, all_scenarios)}


@pytest.fixture(scope="module")
@in_float64()
def plain() -> dict[str, list[dict[str, Any]]]:
    """The results of `plain_way` for each scenario. The special case of each scenario must occur in its results."""
    found = {name: plain_way(steps, settings) for name, (steps, settings, _) in SCENARIOS.items()}

    def total(name: str, metric: str) -> float:
        return sum(step["metrics"].get(metric, 0) for step in found[name])

    for name, (_, _, restart_after) in SCENARIOS.items():
        assert restart_after is None or found[name][restart_after - 1]["metrics"]["sampling/groups_carried"] > 0
    assert total("refilled", "sampling/staleness_max") > 0
    assert total("refilled", "reward/failures") > 0
    assert total("refilled", "reward/timeouts") > 0
    assert 0 in [step["metrics"]["sampling/gen_batches"] for step in found["restarted"]]
    assert total("restarted", "sampling/groups_expired") > 0
    for name, oldest in (("restarted", 1), ("older than a step", 2)):
        assert max(step["metrics"]["sampling/staleness_max"] for step in found[name]) == oldest
    assert total("nothing is carried over", "sampling/groups_expired") > 0
    assert total("nothing is carried over", "sampling/staleness_max") == 0
    assert total("lengths make the difference", "sampling/groups_filled") < 2 * BATCH
    assert [s["metrics"]["sampling/groups_filled"] for s in found["nothing makes a difference"]] == [BATCH] * 2
    assert 0 < total("filled in part", "sampling/groups_filled") < 2 * BATCH
    assert len({group["baseline"] for step in found["greedy baseline"] for group in step["groups"]}) > 2
    return found


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_step_is_that_of_the_plain_way(ranks, plain, name, world_size):
    for number, expected in enumerate(plain[name]):
        parts = [rank[name][number] for rank in ranks[world_size]]
        place = {tuple(group["prompt"]): i for i, group in enumerate(expected["groups"])}
        places = [[place[tuple(group["prompt"][0])] for group in part["groups"]] for part in parts]
        assert places == [sorted(of_rank) for of_rank in places], "the groups must be in the order of the stream"
        assert sorted(i for of_rank in places for i in of_rank) == list(range(BATCH))
        for group in (group for part in parts for group in part["groups"]):
            same = expected["groups"][place[tuple(group["prompt"][0])]]
            assert group["prompt"] == [same["prompt"]] * N
            assert group["responses"] == same["responses"]
            assert group["scores"] == pytest.approx(same["seq_reward"], rel=FLOAT32)
            assert group["baseline"] == [same["baseline"] and pytest.approx(same["baseline"], rel=FLOAT32)] * N
            for row, log_probs in zip(group["log_probs"], same["log_probs"], strict=True):
                # The log-probs are computed in float64 and kept in float32.
                assert row == pytest.approx(log_probs, rel=FLOAT32, abs=TOLERANCE)
        for part in parts:
            metrics = part["metrics"]
            seconds = {key: metrics.pop(key) for key in ("timing_s/gen", "timing_s/reward")}
            assert metrics.pop("timing_s/update_weights") >= 0
            if len(parts) > 1:
                assert metrics.pop("perf/slowest_rank_ratio", 1.0) >= 1.0
                assert metrics.pop("perf/slowest_rank", 0) in range(len(parts))
            assert (min(seconds.values()) > 0) == (metrics.get("sampling/gen_batches") != 0)
            assert part["tokens"] == expected["tokens"]
            assert {k: metrics[k] for k in expected["metrics"]} == pytest.approx(
                expected["metrics"], rel=0, abs=FLOAT32 * HIGHEST
            )
            rest = metrics.keys() - expected["metrics"].keys()
            rest = {key for key in rest if not key.startswith(MACHINE_METRICS)}
            lengths = {"response_length", "response_length_terminated", "prompt_length"}
            assert {key.split("/")[0] for key in rest} == {"reward"} | lengths
            assert rest & {"reward/overlong", "sampling/reward_mean"} == set()


@pytest.mark.parametrize("name", ["refilled", "lengths make the difference"])
def test_groups_stay_on_the_rank_that_generated_them(ranks, plain, name):
    drawn = (DEFAULTS | SCENARIOS[name][1])["drawn"]
    counts = []
    for number, expected in enumerate(plain[name]):
        # In each draw, a rank generates the prompts between its bounds.
        place = {tuple(g["prompt"]): g["uid"] % drawn for g in expected["groups"]}
        for rank in range(3):
            groups = ranks[3][rank][name][number]["groups"]
            low, high = (drawn * end // 3 for end in (rank, rank + 1))
            assert all(low <= place[tuple(group["prompt"][0])] < high for group in groups)
            counts.append(len(groups))
    assert max(counts) - min(counts) > 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_batch_that_cannot_be_filled_is_refused_with_figures(ranks, world_size):
    for rank in ranks[world_size]:
        assert "data.train_batch_size=8 prompts" in rank["stop"]
        assert "has 0 (0 of them from earlier steps)" in rank["stop"]
        assert "max_num_gen_batches=1 generations of 7 prompts" in rank["stop"]
        assert "Raise max_num_gen_batches" in rank["stop"]
        assert "algorithm.filter_groups.on_limit=fill" in rank["stop"]
        assert "data.gen_batch_size: their product must be at least 8" in rank["fill"]


def group(uid: int, n: int = N, baseline: float | None = None, version: int = 0) -> Group:
    samples = [Sample.of(uid, i, [7], [-0.5], "stop", version) for i in range(n)]
    results = [RewardResult(float(i), {"sums": float(i)}) for i in range(n)]
    return Group(uid, [3, uid], samples, results, [0.0] * n, baseline=baseline)


def same_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_loaded_groups_replace_carried_groups():
    collector = build(new_driver(), Coordinator(GlooTransport()))
    assert collector.tensors() == {}
    collector.load_tensors([to_tensors([group(5), group(9)]), {}, to_tensors([group(2)])])
    held = collector.tensors()
    assert same_tensors(held, to_tensors([group(2), group(5), group(9)]))
    collector.load_tensors([held])
    assert same_tensors(collector.tensors(), held)
    collector.load_tensors([])
    assert collector.tensors() == {}


@pytest.mark.parametrize(("greedy", "kept"), [(False, [1]), (True, [3])])
def test_groups_of_other_settings_are_left_out_with_a_warning(greedy, kept, caplog):
    collector = build(new_driver(), Coordinator(GlooTransport()), greedy=greedy)
    groups = {1: group(1), 2: group(2, n=N - 1), 3: group(3, baseline=0.5)}
    collector.load_tensors([to_tensors(list(groups.values()))])
    assert same_tensors(collector.tensors(), to_tensors([groups[uid] for uid in kept]))
    assert "Dropped 2 prompts" in caplog.text


def test_a_bound_that_was_lowered_counts_for_what_the_checkpoint_carried_over(caplog):
    collector = build(new_driver(), Coordinator(GlooTransport()), max_staleness=1)
    # Sampled after 0 steps, for a step that comes after 2 of them.
    collector.load_tensors([to_tensors([group(5), group(9)])])
    metrics = collector.collect(3).metrics
    assert (metrics["sampling/groups_expired"], metrics["sampling/carried_share"]) == (2, 0)
    assert metrics["sampling/staleness_max"] == 0


def test_samples_older_than_the_policy_are_marked_and_a_batch_of_many_is_warned_of(caplog):
    collector = build(new_driver(), Coordinator(GlooTransport()))
    assert collector.collect(1).batch.staleness is None
    collector.prompts.advance_to(1000)
    collector.load_tensors([to_tensors([group(uid, version=1) for uid in range(BATCH // 2)])])
    batch = collector.collect(3).batch
    assert sorted(batch.staleness.amax(dim=1).tolist()) == [0] * (BATCH // 2 * N) + [1] * (BATCH // 2 * N)
    assert "carried over" not in caplog.text
    for step in (4, 5):
        old = [group(uid, version=step - 2) for uid in range(1 + BATCH // 2)]
        collector.load_tensors([to_tensors(old)])
        collector.collect(step)
    assert caplog.text.count("62 % of the batch of step 4 was carried over") == caplog.text.count("carried over") == 1


def test_without_dynamic_sampling_nothing_is_carried_over(caplog):
    collector = build(new_driver(), Coordinator(GlooTransport()), filter_groups=UNFILTERED)
    collector.load_tensors([to_tensors([group(5), group(9)])])
    assert collector.tensors() == {}
    assert "Dropped 2 prompts" in caplog.text
    assert "algorithm.filter_groups.enable=false" in caplog.text


def test_skipped_prompts_are_neither_carried_nor_drawn():
    collector = build(new_driver(), Coordinator(GlooTransport()))
    collector.load_tensors([to_tensors([group(5), group(9)])])
    collector.skip_to(None)
    assert collector.tensors() != {}
    assert collector.prompts.position == 0
    collector.skip_to(30)
    assert collector.tensors() == {}
    assert [drawn.uid for drawn in collector.prompts.next(2)] == [30, 31]


def test_weights_are_synced_once_per_version_unless_invalidated():
    driver = new_driver()
    collector = build(driver, Coordinator(GlooTransport()))
    sampler, requests = collector.generation.sampler, collector.generation.requests(collector.prompts.next(4))

    def samples() -> list[Sample]:
        return sampler.generate(requests, version=3, step=3)

    first = samples()
    driver.step = 20
    assert samples() == first
    sampler.invalidate_weights()
    assert samples() != first
