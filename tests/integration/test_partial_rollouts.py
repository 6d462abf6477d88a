"""Partial rollouts of the embedded engine: ages, every prompt once, resumes after any step, other numbers of ranks."""

from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from rlhf.batch import RolloutBatch
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.experience.collector import Collector
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Sample
from rlhf.rollout.sample_codec import from_arrays, to_arrays
from rlhf.tracking.history import MACHINE_METRICS
from tests.support.checkpoints import equal_bits
from tests.support.numeric_ranks import run_ranks
from tests.support.plain_collect import BATCH, FILTERED, UNFILTERED, N, build, new_driver, tensors_of_ranks

STEPS, K = 5, 2
# Some responses are very long, and the engine has rows for all samples in flight.
LONG = {"longest": 64, "rows": 128}
MASKED = {"top_k": 8, "top_p": 0.97, "sampling_mask": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "every prompt": LONG | {"filter_groups": UNFILTERED},
    "greedy baseline": LONG | {"filter_groups": UNFILTERED, "greedy": True},
    "dynamic sampling": LONG | {"filter_groups": replace(FILTERED, on_limit="fill"), "drawn": 6},
    "greedy baseline, sampling masks": LONG | {"filter_groups": UNFILTERED, "greedy": True, "sampling": MASKED},
    "dynamic sampling, sampling masks": LONG
    | {"filter_groups": replace(FILTERED, on_limit="fill"), "drawn": 6, "sampling": MASKED},
}


@dataclass
class Rank:
    driver: DriverState
    collector: Collector


def start(**settings: Any) -> Rank:
    driver = new_driver()
    return Rank(driver, build(driver, Coordinator(GlooTransport()), **{"async_steps": K} | settings))


def walk(rank: Rank, last: int) -> list[dict[str, Any]]:
    """Return what this rank got in each step up to `last`."""
    records = []
    for step in range(rank.driver.step + 1, last + 1):
        collected = rank.collector.collect(step)
        rank.driver.finish_step(collected.tokens.total, len(collected.batch), 0.0, collected.epochs)
        own = {name: v for name, v in collected.metrics.items() if not name.startswith(MACHINE_METRICS)}
        batch = {f.name: getattr(collected.batch, f.name) for f in fields(RolloutBatch)}
        arrays = to_arrays([sample for group in collected.groups for sample in group.samples])
        samples = {name: torch.from_numpy(array) for name, array in arrays.items()}
        records.append({"batch": batch, "metrics": own, "epochs": collected.epochs, "samples": samples})
    return records


def saved(rank: Rank) -> tuple[int, int, list[Any]]:
    parts = tensors_of_ranks(rank.collector, rank.collector.coordinator)
    return rank.driver.step, rank.collector.prompts.position, parts


def resumed(checkpoint: tuple[int, int, list[Any]], **settings: Any) -> Rank:
    """Return a rank that goes on from `checkpoint`, with the parts that a load gives to this rank."""
    rank = start(**settings)
    rank.driver.step, position, parts = checkpoint
    number, size = rank.collector.coordinator.rank, rank.collector.coordinator.world_size
    rank.collector.load_tensors([part for part in parts[number::size] if part])
    prompts = rank.collector.prompts
    prompts.stream.load_state_dict(prompts.stream.state_dict() | {"consumed": position})
    return rank


def all_runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        runs = found[name] = {"undisturbed": walk(start(**settings), STEPS), "checkpoints": [], "resumed": {}}
        rank = start(**settings)
        for step in range(1, STEPS):
            walk(rank, step)
            runs["checkpoints"].append(saved(rank))
            if name == "every prompt" or step == 2:
                runs["resumed"][step] = walk(resumed(runs["checkpoints"][-1], **settings), STEPS)
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict[str, Any]]]:
    return {1: [all_runs()], 2: run_ranks(2, all_runs)}


def samples_in(record: dict[str, Any]) -> list[Sample]:
    return from_arrays({name: tensor.numpy() for name, tensor in record["samples"].items()})


def samples_of(ranks: list[dict[str, Any]], name: str, step: int) -> list[Sample]:
    return [sample for rank in ranks for sample in samples_in(rank[name]["undisturbed"][step - 1])]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_after_any_step_changes_no_bit(ranks, world_size, name):
    for rank in ranks[world_size]:
        undisturbed = rank[name]["undisturbed"]
        for step, after in rank[name]["resumed"].items():
            for found, expected in zip(after, undisturbed[step:], strict=True):
                assert equal_bits(found, expected)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_samples_span_steps_and_no_token_is_too_old(ranks, world_size, name):
    runs = 0
    for step in range(1, STEPS + 1):
        for sample in samples_of(ranks[world_size], name, step):
            versions = [version for version, _ in sample.versions]
            assert all(a < b for a, b in pairwise(versions))
            assert step - 1 - K <= versions[0]
            assert versions[-1] <= step - 1
            runs = max(runs, len(versions))
    # Dynamic sampling takes more than one share (see `PartialRollouts`) in a step, so that samples wait less.
    assert runs == (2 if name.startswith("dynamic sampling") else K + 1), (
        "no sample spans several versions of the weights"
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["every prompt", "greedy baseline"])
def test_a_batch_is_full_and_no_prompt_comes_twice(ranks, world_size, name):
    uids = []
    for step in range(1, STEPS + 1):
        of_step = {sample.uid for sample in samples_of(ranks[world_size], name, step)}
        assert len(of_step) == BATCH
        assert len(samples_of(ranks[world_size], name, step)) == BATCH * N
        uids += of_step
    assert len(set(uids)) == len(uids)
    assert max(uids) < (STEPS + K) * BATCH, "more than K + 1 batches were in flight"


def test_metrics_count_the_tokens_of_all_ranks(ranks):
    for step in range(1, STEPS + 1):
        metrics = ranks[2][0]["every prompt"]["undisturbed"][step - 1]["metrics"]
        ages: list[int] = []
        for sample in samples_of(ranks[2], "every prompt", step):
            begin = 0
            for version, end in sample.versions:
                ages += [step - 1 - version] * (end - begin)
                begin = end
        ages.sort()
        assert metrics["sampling/token_staleness_max"] == ages[-1]
        assert metrics["sampling/token_staleness_p50"] == ages[(len(ages) + 1) // 2 - 1]
        assert metrics["sampling/prompts_expired"] == 0
        assert metrics["sampling/partial_samples"] > 0


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", [name for name in SETTINGS if "masks" in name])
def test_every_batch_has_the_masks_of_its_samples(ranks, world_size, name):
    for step in range(STEPS):
        records = [rank[name]["undisturbed"][step] for rank in ranks[world_size]]
        masks = [record["batch"]["sampling_mask"] for record in records]
        assert len({mask.shape[2] for mask in masks}) == 1
        for record, mask in zip(records, masks, strict=True):
            rows = iter(mask)
            for sample, row in zip(samples_in(record), rows, strict=True):
                assert sample.sampling_mask is not None
                assert min(sample.sampling_mask.counts) > 0
                kept = torch.from_numpy(sample.sampling_mask.rows(mask.shape[2]))
                assert torch.equal(row[: len(sample)], kept)
                assert (row[: len(sample)] == torch.from_numpy(sample.token_ids)[:, None]).any(dim=1).all()
                assert (row[len(sample) :] == -1).all()


def go_on(name: str, checkpoint: Any) -> list[dict[str, Any]]:
    return walk(resumed(checkpoint, **SETTINGS[name]), STEPS)


@pytest.mark.parametrize("name", ["every prompt", "dynamic sampling", "dynamic sampling, sampling masks"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
def test_other_ranks_go_on_with_the_samples_in_flight(ranks, name, writers, readers):
    checkpoint = ranks[writers][0][name]["checkpoints"][2]
    walks = partial(go_on, name, checkpoint)
    parts = [walks()] if readers == 1 else run_ranks(readers, walks)
    trained = {sample.uid for step in (1, 2, 3) for sample in samples_of(ranks[writers], name, step)}
    for step in range(4, STEPS + 1):
        samples = [sample for part in parts for sample in samples_in(part[step - 4])]
        assert len(samples) == BATCH * N
        assert not trained & {sample.uid for sample in samples}
        trained |= {sample.uid for sample in samples}
        assert all(step - 1 - K <= sample.version for sample in samples)
    first = [sample for part in parts for sample in samples_in(part[0])]
    assert any(len(sample.versions) > 1 for sample in first), "the samples in flight were dropped"


def test_a_rollback_drops_the_prompts_in_flight():
    rank = start(**SETTINGS["every prompt"])
    walk(rank, 3)
    position = rank.collector.position
    rank.collector.invalidate_policy()
    rank.collector.skip_to(position)
    [record] = walk(rank, 4)
    assert min(sample.uid for sample in samples_in(record)) >= position
    assert record["metrics"]["sampling/token_staleness_max"] == 0


def test_a_lower_bound_drops_counts_and_replaces_what_is_too_old(ranks):
    checkpoint = ranks[1][0]["every prompt"]["checkpoints"][2]
    rank = resumed(checkpoint, **SETTINGS["every prompt"] | {"async_steps": 1, "max_staleness": 1})
    in_flight = [each.oldest(3) for each in rank.collector._source.begun]
    records = walk(rank, STEPS)
    assert min(in_flight) < 2 == max(in_flight), "all are too old or due in this step"
    assert records[0]["metrics"]["sampling/prompts_expired"] == len(in_flight) - BATCH
    for record in records:
        assert len(samples_in(record)) == BATCH * N
        assert record["metrics"]["sampling/token_staleness_max"] <= 1


@pytest.mark.parametrize("changed", [{"n": N - 1}, {"longest": 3}, {"async_steps": 0}])
def test_samples_in_flight_that_changed_settings_exclude_are_dropped(ranks, caplog, changed):
    rank = resumed(ranks[1][0]["every prompt"]["checkpoints"][2], **SETTINGS["every prompt"] | changed)
    collected = rank.collector.collect(4)
    assert "Dropped" in caplog.text
    assert len(collected.batch) == BATCH * changed.get("n", N)
