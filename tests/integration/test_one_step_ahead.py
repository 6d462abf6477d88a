"""`rollout.async_steps` with an engine in a thread and real ranks: the policy that a batch is by, and resumes."""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytest

from rlhf.batch import RolloutBatch
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.experience.collector import Collector
from rlhf.experience.prompt_share import PromptShare
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.tracking.history import MACHINE_METRICS
from tests.support.checkpoints import equal_bits
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import run_ranks
from tests.support.plain_collect import BATCH, FILTERED, UNFILTERED, N, build, new_driver, tensors_of_ranks
from tests.support.rounding import FLOAT32

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "every prompt": {"filter_groups": UNFILTERED},
    "greedy baseline": {"filter_groups": UNFILTERED, "greedy": True},
    "greedy baseline, refilled": {"drawn": 20, "greedy": True},
    "a rank without prompts": {"drawn": 1, "filter_groups": replace(FILTERED, max_num_gen_batches=12)},
}


@dataclass
class Rank:
    """A rank of a run, as far as it collects batches."""

    driver: DriverState
    collector: Collector

    @property
    def engine(self) -> Any:
        return self.collector.generation.sampler.engine


def start(steps: int = STEPS, **settings: Any) -> Rank:
    """A rank at the beginning of a run that generates ahead."""
    driver = new_driver()
    driver.total_steps = steps
    return Rank(driver, build(driver, Coordinator(GlooTransport()), **{"ahead": True} | settings))


def walk(rank: Rank, last: int) -> list[dict[str, Any]]:
    """What this rank got in each step up to `last`."""
    records = []
    for step in range(rank.driver.step + 1, last + 1):
        collected = rank.collector.collect(step)
        rank.driver.finish_step(collected.tokens.total, len(collected.batch), 0.0, collected.epochs)
        records.append(
            {
                "batch": {f.name: getattr(collected.batch, f.name) for f in fields(RolloutBatch)},
                "metrics": {
                    name: value for name, value in collected.metrics.items() if not name.startswith(MACHINE_METRICS)
                },
            }
        )
    return records


def saved(rank: Rank) -> tuple[int, int, list[Any]]:
    """What a checkpoint would hold."""
    parts = tensors_of_ranks(rank.collector, rank.collector.coordinator)
    return rank.driver.step, rank.collector.prompts.position, parts


def go_to(prompts: PromptShare, position: int) -> None:
    """What loading the state of the stream does."""
    prompts.stream.load_state_dict(prompts.stream.state_dict() | {"consumed": position})


def resumed(checkpoint: tuple[int, int, list[Any]], **settings: Any) -> Rank:
    """A rank that goes on from `checkpoint`, whose ranks' parts are dealt out as a load does."""
    rank = start(**settings)
    rank.driver.step, position, parts = checkpoint
    number, size = rank.collector.coordinator.rank, rank.collector.coordinator.world_size
    rank.collector.load_tensors([part for part in parts[number::size] if part])
    go_to(rank.collector.prompts, position)
    return rank


@in_float64()
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
        rank = start(**settings)
        for step in range(1, STEPS):
            runs["saved"] += walk(rank, step)
            checkpoint = saved(rank)
            runs["checkpoints"].append(checkpoint)
            runs["resumed"].append(walk(resumed(checkpoint, **settings), STEPS))
        runs["saved"] += walk(rank, STEPS)
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
    return [drawn.prompt.token_ids for drawn in start(filter_groups=UNFILTERED).collector.prompts.next(count)]


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
        metrics = step["metrics"]
        assert metrics["sampling/groups_generated"] == metrics["sampling/gen_batches"] * SETTINGS[name]["drawn"]
    ages = [step["metrics"]["sampling/staleness_max"] for step in parts[0]]
    assert ages[0] == 0
    assert max(ages) >= 1


def test_a_batch_that_is_carried_over_whole_needs_no_generation():
    rank = start(drawn=48)
    collector, engine = rank.collector, rank.engine
    [first] = walk(rank, 1)
    assert first["metrics"]["sampling/groups_carried"] >= BATCH
    assert engine.begun == 0
    before = collector.prompts.position
    [second] = walk(rank, 2)
    assert second["metrics"]["sampling/gen_batches"] == 0
    assert second["metrics"]["sampling/groups_carried"] < BATCH
    assert engine.begun == 1
    assert (collector.position, collector.prompts.position) == (before, before + 48)
    assert equal_bits(walk(resumed(saved(rank), drawn=48), 3), walk(rank, 3))


@pytest.mark.parametrize("world_size", [1, 2])
@in_float64()
def test_a_batch_is_by_the_policy_as_it_was_before_the_step_before(ranks, world_size):
    driver = new_driver()
    collector = build(driver, Coordinator(GlooTransport()), filter_groups=UNFILTERED)
    generation = collector.generation
    for step in range(1, STEPS + 1):
        parts = [rank["every prompt"]["undisturbed"][step - 1] for rank in ranks[world_size]]
        version = driver.step = max(0, step - 2)
        requests = generation.requests(collector.prompts.next())
        expected = generation.sampler.generate(requests, version=version, step=step)
        by_prompt: dict[tuple[int, ...], list[Any]] = {}
        for row in (row for part in parts for row in rows(part["batch"])):
            by_prompt.setdefault(tuple(row[0]), []).append(row)
        for request, sample in zip(requests, expected, strict=True):
            row = by_prompt[tuple(request.token_ids)][request.sample]
            assert row[1] == sample.token_ids.tolist()
            # Of passes in float64, kept in float32.
            assert row[2] == pytest.approx(sample.log_probs.tolist(), rel=FLOAT32, abs=TOLERANCE)
        for part in parts:
            age = float(step > 1)
            assert part["metrics"]["sampling/staleness_mean"] == part["metrics"]["sampling/staleness_max"] == age


@in_float64()
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
        assert len(new) == BATCH * N


def test_the_engine_generates_between_two_calls():
    rank = start(filter_groups=UNFILTERED)
    engine = rank.engine
    for step in (1, 2):
        engine.gate.clear()  # what is begun now does not end before it is set again
        walk(rank, step)
        assert engine.runs
        engine.gate.set()
    assert engine.begun == 2
    walk(rank, 3)
    assert engine.begun == 3


def test_nothing_is_begun_for_a_step_that_does_not_come():
    rank = start(2, filter_groups=UNFILTERED)
    walk(rank, 2)
    assert rank.engine.begun == 1
    assert rank.collector.tensors() == {}
    assert rank.collector.prompts.position == 2 * BATCH


@in_float64()
def test_an_evaluation_has_the_present_weights_and_changes_no_batch(ranks):
    rank = start(filter_groups=UNFILTERED)
    generation = rank.collector.generation
    requests = generation.requests(rank.collector.prompts.next(4))
    go_to(rank.collector.prompts, 0)
    plain = build(rank.driver, Coordinator(GlooTransport()), filter_groups=UNFILTERED).generation
    records = []
    for step in range(1, STEPS + 1):
        records += walk(rank, step)
        samples = generation.sampler.generate(requests, version=step, step=step)
        assert samples == plain.sampler.generate(requests, version=step, step=step)
        assert {sample.version for sample in samples} == {step}
    assert equal_bits(records, ranks[1][0]["every prompt"]["undisturbed"])


def test_a_roll_back_trains_on_nothing_that_ran_and_leaves_out_the_refused_prompts_only():
    rank, every = start(9, filter_groups=UNFILTERED), stream(6 * BATCH)
    collector = rank.collector
    walk(rank, 1)
    step, position, parts = saved(rank)
    walk(rank, 3)
    rejected_until = collector.position
    assert rejected_until == 3 * BATCH
    assert collector.prompts.position == 4 * BATCH
    # Step 3 is refused: back to the checkpoint of step 1, as the loop goes.
    collector.invalidate_policy()
    assert not rank.engine.runs
    collector.load_tensors(parts)
    rank.driver.step = step
    go_to(collector.prompts, position)
    again = walk(rank, 2)
    assert prompts_of([again], 1) == sorted(every[BATCH : 2 * BATCH])
    collector.skip_to(rejected_until)
    [third, fourth] = walk(rank, 4)
    assert prompts_of([[third]], 1) == sorted(every[3 * BATCH : 4 * BATCH])
    assert prompts_of([[fourth]], 1) == sorted(every[4 * BATCH : 5 * BATCH])
    # What takes the place of the refused batch is by the newest policy.
    ages = [record["metrics"]["sampling/staleness_max"] for record in (*again, third, fourth)]
    assert ages == [1, 0, 1]


def test_samples_that_are_made_anew_say_so():
    rank = start(filter_groups=UNFILTERED)
    rank.engine.loses = True
    records = walk(rank, 2)
    rank.engine.loses = False
    checkpoint = saved(rank)
    staleness = [(r["metrics"]["sampling/staleness_mean"], r["metrics"]["sampling/staleness_max"]) for r in records]
    assert staleness == [(0, 0), (0.5, 1)]
    # What is saved after step 2 was finished then, and half of it is by the policy after that step.
    [third] = walk(resumed(checkpoint, filter_groups=UNFILTERED), 3)
    assert (third["metrics"]["sampling/staleness_mean"], third["metrics"]["sampling/staleness_max"]) == (0.5, 1)
    assert equal_bits([third], walk(rank, 3))


def test_a_run_that_goes_on_without_it_trains_on_what_the_checkpoint_has(ranks):
    name = "every prompt"
    runs = ranks[1][0][name]
    third, fourth = walk(resumed(runs["checkpoints"][1], ahead=False, **SETTINGS[name]), 4)
    expected = runs["undisturbed"][2:]
    assert equal_bits(third["batch"], expected[0]["batch"])
    assert prompts_of([[fourth]], 1) == prompts_of([[expected[1]]], 1)


@pytest.mark.parametrize("changed", ["rollout.n", "data.train_batch_size"])
def test_what_no_longer_fits_is_left_out_with_a_warning(ranks, caplog, changed):
    checkpoint = ranks[1][0]["every prompt"]["checkpoints"][1]
    settings = {"n": N - 1} if changed == "rollout.n" else {"batch": BATCH + 1}
    rank = resumed(checkpoint, filter_groups=UNFILTERED, **settings)
    collected = rank.collector.collect(3)
    assert f"Dropped {BATCH} prompts" in caplog.text
    assert changed in caplog.text
    assert collected.metrics["sampling/staleness_max"] == 0
    assert len(collected.batch) == settings.get("batch", BATCH) * settings.get("n", N)
