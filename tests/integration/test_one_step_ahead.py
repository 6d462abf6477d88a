"""`rollout.async_steps` with a real engine in a thread and real ranks: which policy a batch is by, and what becomes of it after a kill."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from rlhf.batch import Batch
from rlhf.experience.collector import Collector
from rlhf.ranks.coordinator import Coordinator
from tests.support.checkpoints import equal_bits
from tests.support.numeric_ranks import run_ranks
from tests.support.plain_collect import BATCH, FILTERED, UNFILTERED, N, build, new_driver

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "every prompt": {"filter_groups": UNFILTERED},
    "greedy baseline": {"filter_groups": UNFILTERED, "greedy": True},
    "greedy baseline, refilled": {"drawn": 20, "greedy": True},
    "a rank without prompts": {"drawn": 1, "filter_groups": replace(FILTERED, max_num_gen_batches=12)},
}


def start(steps: int = STEPS, **settings: Any) -> Collector:
    """A rank at the beginning of a run that generates ahead."""
    driver = new_driver()
    driver.total_steps = steps
    return build(driver, Coordinator(), **{"ahead": True} | settings)


def walk(collector: Collector, last: int) -> list[dict[str, Any]]:
    """What this rank got in each step up to `last`."""
    records = []
    for step in range(collector.driver.step + 1, last + 1):
        batch, metrics, tokens = collector.collect(step)
        collector.driver.finish_step(tokens, len(batch), 0.0)
        records.append(
            {
                "batch": {f.name: getattr(batch, f.name) for f in fields(Batch)},
                "metrics": {name: value for name, value in metrics.items() if not name.startswith("perf/")},
            }
        )
    return records


def saved(collector: Collector) -> tuple[int, int, list[Any]]:
    """What a checkpoint would hold."""
    return (
        collector.driver.step,
        collector.prompts.position,
        [
            {name: tensor.clone() for name, tensor in part.items()}
            for part in collector.coordinator.gather(dict(collector.tensors()))
        ],
    )


def resumed(checkpoint: tuple[int, int, list[Any]], **settings: Any) -> Collector:
    """A rank that goes on from `checkpoint`, whose ranks' parts are dealt out as a load does."""
    collector = start(**settings)
    step, position, parts = checkpoint
    collector.driver.step = step
    rank, size = collector.coordinator.rank, collector.coordinator.world_size
    collector.load_tensors([part for part in parts[rank::size] if part])
    collector.prompts._stream.load_state_dict(collector.prompts._stream.state_dict() | {"consumed": position})
    return collector


def all_scenarios() -> dict[str, Any]:
    """Of each setting the undisturbed run, and those that go on from a save after each of its steps."""
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        runs = found[name] = {
            "undisturbed": walk(start(**settings), STEPS),
            "checkpoints": [],
            "resumed": [],
            "saved": [],
        }
        collector = start(**settings)
        for step in range(1, STEPS):
            runs["saved"] += walk(collector, step)
            checkpoint = saved(collector)
            runs["checkpoints"].append(checkpoint)
            runs["resumed"].append(walk(resumed(checkpoint, **settings), STEPS))
        runs["saved"] += walk(collector, STEPS)
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict[str, Any]]]:
    """What each rank of 1 and of 2 got."""
    return {1: [all_scenarios()], 2: run_ranks(2, all_scenarios)}


def rows(batch: dict[str, Any]) -> list[tuple[list[int], list[int], list[float], float]]:
    """Prompt, response, log-probs and score of each row."""
    found = []
    for i, (p, r) in enumerate(zip(batch["prompt_lengths"].tolist(), batch["response_lengths"].tolist(), strict=True)):
        ids = batch["input_ids"][i].tolist()
        found.append((ids[:p], ids[p : p + r], batch["rollout_log_probs"][i, :r].tolist(), batch["scores"][i].item()))
    return found


def prompts_of(parts: list[dict[str, Any]], step: int) -> list[list[int]]:
    """The prompt of each group that the ranks trained on in `step`."""
    return sorted(row[0] for part in parts for row in rows(part[step - 1]["batch"])[::N])


def stream(count: int) -> list[list[int]]:
    return [request.token_ids for request in start(filter_groups=UNFILTERED).prompts.next(count)[1]]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_after_any_step_changes_no_bit(ranks, world_size, name):
    for rank in ranks[world_size]:
        runs = rank[name]
        assert equal_bits(runs["saved"], runs["undisturbed"])
        for step, after in enumerate(runs["resumed"], start=1):
            assert equal_bits(after, runs["undisturbed"][step:])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["every prompt", "greedy baseline"])
def test_every_prompt_is_trained_on_once_in_its_order(ranks, world_size, name):
    parts, every = [rank[name]["undisturbed"] for rank in ranks[world_size]], stream(STEPS * BATCH)
    for step in range(1, STEPS + 1):
        assert prompts_of(parts, step) == sorted(every[(step - 1) * BATCH : step * BATCH])


@pytest.mark.parametrize("name", ["greedy baseline, refilled", "a rank without prompts"])
def test_dynamic_sampling_trains_on_no_prompt_twice_and_carries_what_is_too_much(ranks, name):
    parts = [rank[name]["undisturbed"] for rank in ranks[2]]
    trained = [tuple(prompt) for step in range(1, STEPS + 1) for prompt in prompts_of(parts, step)]
    assert len(set(trained)) == len(trained) == STEPS * BATCH
    for step in parts[0]:
        told = step["metrics"]
        assert told["sampling/groups_generated"] == told["sampling/gen_batches"] * SETTINGS[name]["drawn"]
    ages = [step["metrics"]["sampling/staleness_max"] for step in parts[0]]
    assert ages[0] == 0
    assert max(ages) >= 1


def test_a_batch_that_is_carried_over_whole_needs_no_generation():
    collector = start(drawn=48)
    engine: Any = collector.generation.sampler.engine
    [first] = walk(collector, 1)
    assert first["metrics"]["sampling/groups_carried"] >= BATCH
    assert engine.begun == 0
    before = collector.prompts.position
    [second] = walk(collector, 2)
    assert second["metrics"]["sampling/gen_batches"] == 0
    assert second["metrics"]["sampling/groups_carried"] < BATCH
    assert engine.begun == 1
    assert (collector.position, collector.prompts.position) == (before, before + 48)
    assert equal_bits(walk(resumed(saved(collector), drawn=48), 3), walk(collector, 3))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_is_by_the_policy_as_it_was_before_the_step_before(ranks, world_size):
    collector = build(new_driver(), Coordinator(), filter_groups=UNFILTERED)
    generation = collector.generation
    for step in range(1, STEPS + 1):
        parts = [rank["every prompt"]["undisturbed"][step - 1] for rank in ranks[world_size]]
        version = collector.driver.step = max(0, step - 2)
        _, requests = collector.prompts.next()
        expected = generation.sampler.generate(requests, generation.params, version=version, step=step)
        by_prompt: dict[tuple[int, ...], list[Any]] = {}
        for row in (row for part in parts for row in rows(part["batch"])):
            by_prompt.setdefault(tuple(row[0]), []).append(row)
        for i, request in enumerate(requests):
            got = by_prompt[tuple(request.token_ids)]
            for row, sample in zip(got, expected[i * N : (i + 1) * N], strict=True):
                assert row[1] == sample.token_ids
                assert row[2] == pytest.approx(sample.log_probs, abs=1e-4)
        for part in parts:
            age = float(step > 1)
            assert part["metrics"]["sampling/staleness_mean"] == part["metrics"]["sampling/staleness_max"] == age


def go_on(name: str, checkpoint: Any) -> list[dict[str, Any]]:
    return walk(resumed(checkpoint, **SETTINGS[name]), STEPS)


@pytest.mark.parametrize("name", ["every prompt", "greedy baseline, refilled"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
def test_at_another_number_of_ranks_the_batch_is_dealt_anew(ranks, name, writers, readers):
    after = 2
    checkpoint = ranks[writers][0][name]["checkpoints"][after - 1]
    walks = partial(go_on, name, checkpoint)
    parts = [walks()] if readers == 1 else run_ranks(readers, walks)
    before = [rank[name]["undisturbed"] for rank in ranks[writers]]
    for step in range(after + 1, STEPS + 1):
        old = sorted(row for part in before for row in rows(part[step - 1]["batch"]))
        new = sorted(row for part in parts for row in rows(part[step - after - 1]["batch"]))
        assert [row[:2] for row in new] == [row[:2] for row in old]
        if name == "every prompt" and step == after + 1:
            assert new == old  # read, not generated
        assert all(len(rows(part[step - after - 1]["batch"])) == BATCH * N // readers for part in parts)


def test_the_engine_generates_between_two_calls():
    collector = start(filter_groups=UNFILTERED)
    engine: Any = collector.generation.sampler.engine
    for step in (1, 2):
        engine.gate.clear()  # what is begun now does not end before it is set again
        walk(collector, step)
        assert engine.runs
        engine.gate.set()
    assert engine.begun == 2
    walk(collector, 3)
    assert engine.begun == 3


def test_nothing_is_begun_for_a_step_that_does_not_come():
    collector = start(2, filter_groups=UNFILTERED)
    engine: Any = collector.generation.sampler.engine
    walk(collector, 2)
    assert engine.begun == 1
    assert collector.tensors() == {}
    assert collector.prompts.position == 2 * BATCH


def test_an_evaluation_has_the_present_weights_and_changes_no_batch(ranks):
    collector = start(filter_groups=UNFILTERED)
    generation = collector.generation
    requests = collector.prompts.next(4)[1]
    collector.prompts._stream.load_state_dict(collector.prompts._stream.state_dict() | {"consumed": 0})
    plain = build(collector.driver, Coordinator(), filter_groups=UNFILTERED).generation
    records = []
    for step in range(1, STEPS + 1):
        records += walk(collector, step)
        asked: dict[str, Any] = {"version": step, "step": step}
        samples = generation.sampler.generate(requests, generation.params, **asked)
        assert samples == plain.sampler.generate(requests, generation.params, **asked)
        assert {sample.version for sample in samples} == {step}
    assert equal_bits(records, ranks[1][0]["every prompt"]["undisturbed"])


def test_a_roll_back_trains_on_nothing_that_ran_and_leaves_out_the_refused_prompts_only():
    collector, every = start(9, filter_groups=UNFILTERED), stream(6 * BATCH)
    walk(collector, 1)
    step, position, parts = saved(collector)
    walk(collector, 3)
    refused_until = collector.position
    assert refused_until == 3 * BATCH
    assert collector.prompts.position == 4 * BATCH
    # Step 3 is refused: back to the checkpoint of step 1, as the loop goes.
    collector.forget()
    engine: Any = collector.generation.sampler.engine
    assert not engine.runs
    collector.load_tensors(parts)
    collector.driver.step = step
    collector.prompts._stream.load_state_dict(collector.prompts._stream.state_dict() | {"consumed": position})
    again = walk(collector, 2)
    assert prompts_of([again], 1) == sorted(every[BATCH : 2 * BATCH])
    collector.skip_to(refused_until)
    [third, fourth] = walk(collector, 4)
    assert prompts_of([[third]], 1) == sorted(every[3 * BATCH : 4 * BATCH])
    assert prompts_of([[fourth]], 1) == sorted(every[4 * BATCH : 5 * BATCH])
    # What takes the place of the refused batch is by the newest policy.
    ages = [record["metrics"]["sampling/staleness_max"] for record in (*again, third, fourth)]
    assert ages == [1, 0, 1]


def test_samples_that_are_made_anew_say_so():
    collector = start(filter_groups=UNFILTERED)
    engine: Any = collector.generation.sampler.engine
    engine.loses = True
    records = walk(collector, 2)
    engine.loses = False
    checkpoint = saved(collector)
    told = [(r["metrics"]["sampling/staleness_mean"], r["metrics"]["sampling/staleness_max"]) for r in records]
    assert told == [(0, 0), (0.5, 1)]
    # What is saved after step 2 was finished then, and half of it is by the policy after that step.
    [third] = walk(resumed(checkpoint, filter_groups=UNFILTERED), 3)
    assert (third["metrics"]["sampling/staleness_mean"], third["metrics"]["sampling/staleness_max"]) == (0.5, 1)
    assert equal_bits([third], walk(collector, 3))


def test_a_run_that_goes_on_without_it_trains_on_what_the_checkpoint_has(ranks):
    name = "every prompt"
    runs = ranks[1][0][name]
    collector = resumed(runs["checkpoints"][1], ahead=False, **SETTINGS[name])
    third, fourth = walk(collector, 4)
    expected = runs["undisturbed"][2:]
    assert equal_bits(third["batch"], expected[0]["batch"])
    assert prompts_of([[fourth]], 1) == prompts_of([[expected[1]]], 1)


@pytest.mark.parametrize("changed", ["rollout.n", "data.train_batch_size"])
def test_what_no_longer_fits_is_left_out_with_a_warning(ranks, caplog, changed):
    checkpoint = ranks[1][0]["every prompt"]["checkpoints"][1]
    collector = start(filter_groups=UNFILTERED)
    if changed == "rollout.n":
        collector.generation.params = replace(collector.generation.params, n=N - 1)
    else:
        collector.config.data.train_batch_size = BATCH + 4
    collector.load_tensors(checkpoint[2])
    collector.driver.step = 2
    collector.prompts.skip_to(checkpoint[1])
    batch, metrics, _ = collector.collect(3)
    assert f"Left out {BATCH} prompts" in caplog.text
    assert changed in caplog.text
    assert metrics["sampling/staleness_max"] == 0
    assert len(batch) == BATCH * collector.generation.params.n
