"""The rollout journal with the real engine and real ranks: no sample in it is generated or scored again."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.batch import RolloutBatch
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.experience.collector import Collector
from rlhf.experience.journal import FOLDER, Journal
from rlhf.experience.journal_records import frame, payloads
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardItem, Score
from rlhf.rollout import Request, Sample, Weights
from rlhf.tracking.history import MACHINE_METRICS
from tests.support.launching import flip_a_byte
from tests.support.numeric_ranks import run_ranks
from tests.support.plain_collect import BATCH, FILTERED, OVERLONG, UNFILTERED, N, Sums, build, new_driver

STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "refilled": {"drawn": 7, "greedy": True},
    "a rank without prompts": {"drawn": 1, "filter_groups": replace(FILTERED, max_num_gen_batches=14)},
    "every prompt": {"filter_groups": UNFILTERED, "greedy": True, "overlong": OVERLONG},
}


class Counted:
    """The real engine. Counts the requested samples and the weight syncs."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.generated, self.updates, self.dtype = 0, 0, engine.dtype

    def update_weights(self, weights: Weights, version: int) -> None:
        self.updates += 1
        self._engine.update_weights(weights, version)

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        self.generated += len(requests)
        return self._engine.generate(requests, seed=seed, step=step)

    def sleep(self) -> bool:
        return self._engine.sleep()

    def metrics(self) -> dict[str, float]:
        return self._engine.metrics()


class Counting(Sums):
    """The reward. Counts the samples that it scores, and fails at call number `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.scored, self._calls, self._fails_at = 0, 0, fails_at

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        self._calls += 1
        if self._calls == self._fails_at:
            raise RuntimeError("a function of the user's")
        self.scored += len(items)
        return super().score(items)


@dataclass
class Rank:
    """The parts of a rank that collect batches. `run_dir` is None without a journal."""

    driver: DriverState
    collector: Collector
    run_dir: Path | None


def start(folder: Path | None, name: str, fails_at: int | None = None) -> Rank:
    """Return a rank at the beginning of a run. Its journal is below `folder`; None: no journal."""
    driver, coordinator = new_driver(), Coordinator(GlooTransport())
    collector = build(driver, coordinator, **SETTINGS[name])
    collector.generation.early = None  # which may score a sample twice
    collector.generation.sampler.engine = Counted(collector.generation.sampler.engine)
    [term] = collector.generation.reward._terms
    collector.generation.reward._terms = [replace(term, scorer=Counting(fails_at))]
    if folder is None:
        return Rank(driver, collector, None)
    run_dir = folder / name.replace(" ", "_")
    run_dir.mkdir(parents=True, exist_ok=True)
    collector.generation.journal = Journal(run_dir, f"run with {name}", "the reward", coordinator)
    return Rank(driver, collector, run_dir)


def walk(rank: Rank, last: int = STEPS) -> list[dict[str, Any]]:
    """Return this rank's batch of each step, and the counts of samples generated and scored and of weight syncs."""
    records = []
    for step in range(rank.driver.step + 1, last + 1):
        engine, [term] = rank.collector.generation.sampler.engine, rank.collector.generation.reward._terms
        engine.generated = engine.updates = term.scorer.scored = 0
        collected = rank.collector.collect(step)
        rank.driver.finish_step(collected.tokens.total, len(collected.batch), 0.0, collected.epochs)
        metrics = collected.metrics
        records.append(
            {
                "batch": {f.name: getattr(collected.batch, f.name) for f in fields(RolloutBatch)},
                "metrics": {name: value for name, value in metrics.items() if not name.startswith(MACHINE_METRICS)},
                "perf": {name: value for name, value in metrics.items() if name.startswith("perf/journal")},
                "tokens": collected.tokens.total,
                "generated": engine.generated,
                "updates": engine.updates,
                "scored": term.scorer.scored,
            }
        )
    return records


def files(rank: Rank, step: int) -> list[Path]:
    assert rank.run_dir is not None
    return sorted((rank.run_dir / FOLDER).glob(f"step_{step}.*"))


def on_leader(action: Any) -> None:
    Coordinator(GlooTransport()).on_leader(action)


def forget_rewards(path: Path) -> None:
    """Remove the rewards from a journal file, as if the run had been killed while it computed them."""
    found, _ = payloads(path.read_bytes())
    path.write_bytes(b"".join(frame(p) for p in found if p is not None and b'"results"' not in p.split(b"\n")[0]))


def go_back(rank: Rank, step: int, position: int) -> None:
    """Do what a rollback to the checkpoint of `step` does."""
    rank.driver.step = step
    rank.collector.generation.sampler.invalidate_weights()
    stream = rank.collector.prompts.stream
    stream.load_state_dict(stream.state_dict() | {"consumed": position})


def all_scenarios(folder: Path) -> dict[str, Any]:
    """Run all scenarios in order on this rank. Each scenario finds the journal of the scenarios before it."""
    found: dict[str, Any] = {}
    for name in SETTINGS:
        steps = found[name] = {
            "without": walk(start(None, name)),
            "first": walk(start(folder, name)),
            "again": walk(start(folder, name)),
        }
        rank = start(folder, name)
        on_leader(lambda r=rank: flip_a_byte(files(r, 2)[-1]))
        steps["flipped"] = walk(rank)
        steps["mended"] = walk(start(folder, name))
        on_leader(lambda r=rank: forget_rewards(files(r, 2)[0]))
        steps["no rewards"] = walk(start(folder, name))

    name = "every prompt"
    # A user's function fails at the second step, and is fixed before the next start.
    failing = start(folder / "failing", name, fails_at=2)
    steps = found["failing"] = {"first": walk(failing, 1)}
    with pytest.raises(RuntimeError, match="of the user's"):
        walk(failing)
    steps["again"] = walk(start(folder / "failing", name))

    # Roll back to the checkpoint of step 1. The third step was rejected, so the repetition draws other prompts.
    rank = start(folder / "rollback", name)
    walk(rank, 1)
    position = rank.collector.position
    steps = found["rollback"] = {"first": walk(rank)}
    rejected_until = rank.collector.position
    go_back(rank, 1, position)
    steps["second"] = walk(rank, 2)
    rank.collector.skip_to(rejected_until)
    steps["other data"] = walk(rank, 5)
    # A restart begins at step 1 and does not know of the rollback. This time the third step is not rejected.
    steps["not refused"] = walk(start(folder / "rollback", name), 5)
    return found


def sizes_changed(folder: Path) -> dict[str, Any]:
    """Return the steps of runs that find a journal written by another number of ranks."""
    return {name: walk(start(folder, name)) for name in SETTINGS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, Any]]]:
    """The results of each rank: on 1 rank, on 2 ranks, on 1 rank with the journal of 2 ranks, and the reverse."""
    folders = {size: tmp_path_factory.mktemp(f"of_{size}") for size in (1, 2)}
    return {
        1: [all_scenarios(folders[1])],
        2: run_ranks(2, partial(all_scenarios, folders[2])),
        "2 to 1": [sizes_changed(folders[2])],
        "1 to 2": run_ranks(2, partial(sizes_changed, folders[1])),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


def assert_equal(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert all(same(one[what], other[what]) for what in ("batch", "metrics", "tokens"))


def cost(records: list[dict[str, Any]], what: str) -> list[int]:
    return [record[what] for record in records]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("after", ["first", "again", "flipped", "mended", "no rewards"])
def test_the_journal_changes_no_bit(ranks, size, name, after):
    for rank in ranks[size]:
        assert_equal(rank[name][after], rank[name]["without"])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_in_the_journal_is_neither_generated_nor_scored(ranks, size, name):
    for rank in ranks[size]:
        first, again = rank[name]["first"], rank[name]["again"]
        assert cost(first, "generated") == cost(rank[name]["without"], "generated")
        for what in ("generated", "scored", "updates"):
            assert cost(again, what) == [0] * STEPS
        for one, other in zip(first, again, strict=True):
            drawn = one["metrics"].get("sampling/gen_batches", 1) > 0
            assert one["perf"].get("perf/journal_samples") == (0 if drawn else None)
            assert other["perf"].get("perf/journal_samples") == (1 if drawn else None)
            assert (one["perf"]["perf/journal_bytes"] > 0) == drawn
            assert other["perf"]["perf/journal_bytes"] == 0
    assert sum(sum(cost(rank[name]["first"], "generated")) for rank in ranks[size]) > STEPS * BATCH * N / 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_only_damaged_records_are_generated_or_scored_again(ranks, size, name):
    damaged, whole = ranks[size][-1][name], ranks[size][:-1]
    generated, scored = cost(damaged["flipped"], "generated"), cost(damaged["flipped"], "scored")
    assert generated[0] == generated[2] == scored[0] == scored[2] == 0
    assert scored[1] > 0
    for rank in whole:
        assert cost(rank[name]["flipped"], "generated") == [0] * STEPS
        assert cost(rank[name]["flipped"], "scored") == [0] * STEPS
    for rank in ranks[size]:
        assert cost(rank[name]["mended"], "scored") == [0] * STEPS


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_missing_rewards_are_computed_without_generating_again(ranks, size, name):
    first_of_file = next(rank for rank in ranks[size] if rank[name]["first"][1]["scored"])
    for rank in ranks[size]:
        expected = rank[name]["first"][1]["scored"] if rank is first_of_file else 0
        assert cost(rank[name]["no rewards"], "generated") == [0] * STEPS
        assert cost(rank[name]["no rewards"], "scored") == [0, expected, 0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_function_that_fails_costs_no_samples(ranks, size):
    for rank in ranks[size]:
        again = rank["failing"]["again"]
        assert_equal(again, rank["every prompt"]["without"])
        assert [n > 0 for n in cost(again, "generated")] == [False, False, True]
        assert [n > 0 for n in cost(again, "scored")] == [False, True, True]


@pytest.mark.parametrize("size", [1, 2])
def test_a_rollback_repeats_from_the_journal_and_draws_anew(ranks, size):
    for rank in ranks[size]:
        found = rank["rollback"]
        assert_equal(found["second"], found["first"][:1])
        assert cost(found["second"], "generated") == [0]
        assert all(cost(found["other data"], "generated"))
        # The third step repeats the rejected step from the journal. Journaled samples of later steps are not used,
        # because their weights came from other data.
        assert [n > 0 for n in cost(found["not refused"], "generated")] == [False, False, False, True, True]
        assert_equal(found["not refused"][1:3], found["first"])


@pytest.mark.parametrize("change", ["2 to 1", "1 to 2"])
@pytest.mark.parametrize("name", SETTINGS)
def test_another_number_of_ranks_generates_nothing_either(ranks, change, name):
    size = int(change[0])

    def rows(parts: list[dict[str, Any]], step: int) -> list[str]:
        found = []
        for part in parts:
            batch = part[step]["batch"]
            for i, (p, r) in enumerate(zip(batch["prompt_lengths"], batch["response_lengths"], strict=True)):
                of_sample = (batch["input_ids"][i, : p + r], batch["rollout_log_probs"][i, :r], batch["scores"][i])
                found.append(repr([column.tolist() for column in of_sample]))
        return sorted(found)

    before, now = [rank[name]["without"] for rank in ranks[size]], [rank[name] for rank in ranks[change]]
    for step in range(STEPS):
        assert rows(now, step) == rows(before, step)
    for rank in now:
        for what in ("generated", "scored", "updates"):
            assert cost(rank, what) == [0] * STEPS
