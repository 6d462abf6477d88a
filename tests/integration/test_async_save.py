"""Asynchronous saves: they store the state at the call, and lose nothing, hide no error and leave no rank waiting."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.config import Config
from rlhf.errors import EXIT_DONE, Preempted, UserError
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import equal_bits, even_range
from tests.support.compare_runs import differences
from tests.support.launching import copy_run, ranks, records, small
from tests.support.saving_behind import DEADLINE_S, SIZE, Blocker, Run, on_ranks, published, saving_behind
from tests.support.thread_ranks import run_thread_ranks
from tests.support.undisturbed import EXPORT, Undisturbed
from tests.support.verified import verify


@pytest.fixture
def config(tmp_path) -> Config:
    return saving_behind(tmp_path)


def train_on_during_a_save(rank: int, config: Config) -> list[str]:
    run, wrong = Run(rank, config), []
    Blocker("commit.before")
    run.step()
    at_the_save = run.everything()
    if run.checkpointer.save(1, {"val/accuracy": 0.25}) is not None:
        wrong.append("a save has a result before it is written")
    for _ in range(3):
        run.checkpointer.maybe_save(run.step(), {})
    if published(config) or equal_bits(run.everything()["weight"], at_the_save["weight"]):
        wrong.append("the training did not move on during the save")
    result = run.checkpointer.finish()
    if result is None or result.path != step_dir(config.run_dir, 1):
        wrong.append(f"finish returned {result}")
    other = Run(rank, config)
    assert other.checkpointer.resume()
    loaded = other.everything()
    return wrong + [f"{key} is not as at the save" for key in loaded if not equal_bits(loaded[key], at_the_save[key])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_stores_the_state_at_its_call(tmp_path, config, world_size):
    assert on_ranks(tmp_path, world_size, train_on_during_a_save, config) == [[]] * world_size
    # The exported model, which all ranks write together, has the state at the call, too.
    exported = load_file(step_dir(config.run_dir, 1) / "actor/huggingface/model.safetensors")
    assert torch.equal(exported["weight"], even_range(SIZE, 0, 1, 1)[0])
    assert read_manifest(step_dir(config.run_dir, 1)).metrics == {"val/accuracy": 0.25}


def save_twice(rank: int, config: Config) -> list[str]:
    run, wrong = Run(rank, config), []
    if rank == 0:
        Blocker()
    run.step()
    run.checkpointer.save(1)
    run.step()
    first = run.checkpointer.save(2)
    # Rank 1's save thread waits for rank 0's thread, so rank 1's training waits, too.
    if 1 not in published(config):
        wrong.append("the second save did not wait")
    if first is None or first.path.name != "global_step_1" or first.wait_seconds > first.blocked_seconds:
        wrong.append(f"the second save returned {first}")
    second = run.checkpointer.finish()
    if second is None or not 0 < second.wait_seconds < second.blocked_seconds:
        wrong.append(f"finish returned {second}")
    if run.checkpointer.finish() is not None or run.checkpointer.maybe_save(7, {}) is not None:
        wrong.append("a result is returned twice")
    return wrong


def test_the_next_save_waits_for_the_one_in_flight(config):
    assert run_thread_ranks(2, save_twice, config) == [[], []]
    assert published(config) == [2, 1]
    # The save decides before the copy that the reference of step 1 need not be written again.
    assert verify(step_dir(config.run_dir, 2)).linked == {"ref/model": "global_step_1"}


def leave(rank: int, config: Config, how: str) -> tuple[list[int], str]:
    """Leave the training with a save in flight. Return the published steps and how the training ended."""
    config.trainer.preempt_grace_s = 4.0  # a crash waits a quarter of this time for the save
    run, blocker = Run(rank, config), Blocker()
    try:
        with run.checkpointer.committing():
            run.checkpointer.save(run.step())
            assert blocker.there.wait(DEADLINE_S)
            if how == "asked to stop":
                run.checkpointer.save(run.driver.step)
                run.checkpointer.finish()
                raise Preempted
            if how == "user error":
                raise UserError(how)
            if how == "crash":
                raise RuntimeError(how)
    except (Preempted, UserError, RuntimeError) as error:
        return published(config), type(error).__name__
    return published(config), "end"


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("end", ([1], "end")),
        ("asked to stop", ([1], "Preempted")),
        ("user error", ([1], "UserError")),
        ("crash", ([], "RuntimeError")),
    ],
)
def test_an_orderly_exit_waits_for_the_commit(tmp_path, config, how, outcome):
    # A crash needs a process: only the end of the process stops the save that is still in flight.
    [ended] = on_ranks(tmp_path, 1, leave, config, how) if how == "crash" else run_thread_ranks(1, leave, config, how)
    assert ended == outcome


def roll_back(rank: int, config: Config) -> tuple[bool, list[int]]:
    run = Run(rank, config)
    run.checkpointer.save(run.step())
    saved = run.everything()
    run.checkpointer.finish()
    Blocker()
    run.checkpointer.save(run.step())
    saved = run.everything()
    run.step()
    assert run.checkpointer.resume()
    return equal_bits(run.everything(), saved), published(config)


def test_a_roll_back_waits_for_the_commit_and_returns_to_it(config):
    assert run_thread_ranks(2, roll_back, config) == [(True, [2, 1])] * 2


def test_async_and_synchronous_saves_give_the_same_bits(tmp_path, undisturbed: Undisturbed, sums: Path):
    behind = undisturbed.run_dir(2)
    end = ranks(tmp_path / "log", [*small(tmp_path, "in_front", sums), EXPORT, "checkpoint.async_save=false"], nproc=2)
    assert end.code == EXIT_DONE, end.output
    in_front = tmp_path / "rlhf" / "in_front"
    assert differences(behind, in_front) == []
    for run_dir in (behind, in_front):
        [record, *_] = [record for record in records(run_dir) if "perf/save_seconds" in record]
        manifest = read_manifest(step_dir(run_dir, 3))
        by_role = {key.rpartition("/")[2]: value for key, value in record.items() if key.startswith("perf/save_bytes/")}
        assert record["perf/save_bytes"] == manifest.total_bytes == sum(by_role.values())
        assert by_role.keys() == {"actor", "other"}
        assert by_role["actor"] > 0.9 * manifest.total_bytes
        assert 0 < record["perf/save_seconds/actor"] < record["perf/save_seconds"]
        assert 0 <= record["perf/save_wait_seconds"] < record["timing_s/save_checkpoint"]
        assert record["timing_s/save_checkpoint"] <= record["perf/save_seconds"] + record["perf/save_wait_seconds"]


def test_a_resume_logs_seconds_and_bytes_of_its_load(tmp_path, undisturbed: Undisturbed, sums: Path):
    run_dir = copy_run(undisturbed.run_dir(1), tmp_path / "rlhf" / "resumed", 3)
    manifest = read_manifest(step_dir(run_dir, 3))
    end = ranks(tmp_path / "log", [*small(tmp_path, "resumed", sums), EXPORT])
    assert end.code == EXIT_DONE, end.output
    with_figures = {record["step"]: record for record in records(run_dir) if "perf/load_seconds" in record}
    assert with_figures.keys() == {4}
    by_role = {role: with_figures[4][f"perf/load_bytes/{role}"] for role in ("actor", "other")}
    assert with_figures[4]["perf/load_bytes"] == sum(by_role.values()) >= manifest.total_bytes
    assert by_role["actor"] > by_role["other"]
