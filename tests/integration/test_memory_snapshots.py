"""Snapshots in memory: from which state a start continues, and which snapshots it never uses."""

import json
import shutil
from pathlib import Path

import pytest

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.state.run_file import write_run_file
from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.errors import UserError
from rlhf.storage.layout import HISTORY, POINTER, RESOLVED, scan, step_dir, step_of
from tests.support.hostile import with_hash
from tests.support.in_memory import MemoryRun, folder_of, in_memory, memory_base, snapshots
from tests.support.saving_behind import published
from tests.support.small_disks import small_disk
from tests.support.thread_ranks import messages, run_thread_ranks


@pytest.fixture
def base():
    with memory_base() as folder:
        yield folder


def begin(rank: int, config: Config, steps: int, saves: tuple[int, ...] = ()) -> dict:
    """Start, train, save some steps on disk, and crash."""
    run = MemoryRun(rank, config)
    run.checkpointer.resume()
    for step in range(1, steps + 1):
        run.train(1)
        if step in saves:
            run.checkpointer.save(step)
    run.crash()
    return run.everything()


def resume(rank: int, config: Config) -> tuple[int, dict, list[str]]:
    """Start again; return the step, the state and the log."""
    log = messages()
    run = MemoryRun(rank, config)
    run.checkpointer.resume()
    run.crash()
    return run.driver.step, run.everything(), log


def equal(a: dict, b: dict) -> bool:
    return {**a, "weight": 0, "moment": 0, "reference": 0, "carried": 0} == {
        **b,
        "weight": 0,
        "moment": 0,
        "reference": 0,
        "carried": 0,
    } and all((a[name] == b[name]).all() for name in ("weight", "moment", "reference", "carried"))


@pytest.mark.parametrize("world", [1, 2])
def test_a_crash_after_a_step_repeats_no_step(world, tmp_path, base):
    """Promise 21: the published snapshot has the exact state; no file on the disk refers to it."""
    config = in_memory(tmp_path, base)
    before = run_thread_ranks(world, begin, config, 5, (2,))
    assert snapshots(config) == [5, 4]
    assert published(config) == [2]
    assert (config.run_dir / POINTER).read_text().strip() == "2"
    for (step, state, _), expected in zip(run_thread_ranks(world, resume, config), before, strict=True):
        assert step == 5
        assert equal(state, expected)


def test_another_number_of_ranks_uses_the_snapshot(tmp_path, base):
    config = in_memory(tmp_path, base)
    run_thread_ranks(2, begin, config, 3)
    [(step, *_)] = run_thread_ranks(1, resume, config)
    assert step == 3


def test_without_the_memory_the_disk_is_used(tmp_path, base):
    config = in_memory(tmp_path, base)
    begin(0, config, 3, (2,))
    shutil.rmtree(folder_of(config))  # a power cut
    assert resume(0, config)[0] == 2


def test_a_run_that_was_never_saved_continues_from_memory(tmp_path, base):
    config = in_memory(tmp_path, base)
    begin(0, config, 3)
    assert resume(0, config)[0] == 3
    shutil.rmtree(folder_of(config))
    assert resume(0, config)[0] == 0


def test_damage_in_any_file_is_found_and_the_older_state_used(tmp_path, base):
    """Promise 4, for snapshots. A start falls back to the older snapshot, then to the disk."""
    config = in_memory(tmp_path, base)
    expected = begin(0, config, 4)
    names = sorted(read_manifest(step_dir(folder_of(config), 4)).files)
    assert len(names) > 8
    kept = tmp_path / "kept"
    shutil.copytree(folder_of(config), kept)
    for name in [*names, "manifest.json"]:
        shutil.rmtree(folder_of(config))
        shutil.copytree(kept, folder_of(config))
        path = step_dir(folder_of(config), 4) / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.unlink()
        path.write_bytes(content)
        step, state, log = resume(0, config)
        assert step == 3, name
        assert state["position"] == expected["position"] - 1
        assert any("step 4 is not used" in line for line in log)
        assert snapshots(config) == [3], "the damaged snapshot must not be in the way of the next one"


def test_damage_everywhere_leaves_the_disk_and_nothing_half_loaded(tmp_path, base):
    config = in_memory(tmp_path, base)
    begin(0, config, 4, (1,))
    for path in scan(folder_of(config)):
        (path / "driver_state.json").write_text("{}")
    assert resume(0, config)[0] == 1
    # A run without a checkpoint begins at step 0 with the state that it built.
    other = in_memory(tmp_path / "other", base)
    begin(0, other, 2)
    for path in scan(folder_of(other)):
        schedule = path / "actor/extra/lr_scheduler.json"
        schedule.write_text(schedule.read_text().replace("2", "3").replace("1", "3"))
    fresh = MemoryRun(0, other)
    built = fresh.everything()
    assert not fresh.checkpointer.resume()
    fresh.crash()
    assert equal(fresh.everything(), built)
    assert snapshots(other) == []


def test_a_snapshot_of_another_trajectory_is_never_used(tmp_path, base):
    config = in_memory(tmp_path, base)
    begin(0, config, 4, (2,))
    history = config.run_dir / HISTORY
    records = history.read_text().splitlines(keepends=True)
    # A rollback, or a copy of the run directory from step 2, has rewritten the records.
    history.write_text("".join(records[:2]))
    step, _, log = resume(0, config)
    assert step == 2
    assert sum("another metric history" in line for line in log) == 2
    assert snapshots(config) == []


def test_a_snapshot_of_another_run_in_the_directory_is_never_used(tmp_path, base):
    config = in_memory(tmp_path, base)
    begin(0, config, 4, (2,))
    folder_of(config).rename(folder_of(config).with_name(folder_of(config).name[:-1] + "x"))
    assert resume(0, config)[0] == 2


def test_a_snapshot_after_the_runs_last_step_is_not_used(tmp_path, base):
    config = in_memory(tmp_path, base)
    begin(0, config, 4, (2,))
    run = MemoryRun(0, config)
    run.driver.total_steps = 3
    run.checkpointer.resume()
    run.crash()
    assert run.driver.step == 3
    assert snapshots(config) == [3]


def test_a_rollback_ignores_and_drops_snapshots(tmp_path, base):
    config = in_memory(tmp_path, base)
    begin(0, config, 1, (1,))
    run = MemoryRun(0, config)
    run.checkpointer.resume()
    run.train(3)
    assert run.checkpointer.resume()
    assert run.driver.step == 1
    assert all(step <= 1 for step in snapshots(config))
    run.train(1)
    run.crash()
    assert snapshots(config)[0] == 2


def test_a_due_checkpoint_is_saved_after_a_resume_from_memory(tmp_path, base):
    config = in_memory(tmp_path, base)
    begin(0, config, 4, (2,))
    config.trainer.save_freq = 4
    run = MemoryRun(0, config)
    run.checkpointer.resume()
    assert run.checkpointer.save_restored(last=False) is not None
    assert published(config) == [4, 2]
    assert read_manifest(step_dir(config.run_dir, 4)).metrics == {"val/accuracy": 0.5}
    run.crash()
    again = MemoryRun(0, config)
    again.checkpointer.resume()
    assert again.checkpointer.save_restored(last=False) is None
    again.crash()


@pytest.mark.parametrize(("saved", "missing"), [((2,), True), ((2, 4), False)])
def test_a_due_checkpoint_that_the_crash_prevented_is_named(tmp_path, base, caplog, saved, missing):
    config = in_memory(tmp_path, base)
    begin(0, config, 5, saved)
    config.trainer.save_freq = 4
    run = MemoryRun(0, config)
    run.checkpointer.resume()
    assert run.driver.step == 5
    assert ("the save of step 4" in caplog.text) is missing
    run.crash()


def test_a_run_that_may_roll_back_has_a_checkpoint_after_a_resume_from_memory(tmp_path, base):
    """The crash may have prevented the checkpoint of step 0, without which a rollback ends the run."""
    config = in_memory(tmp_path, base)
    begin(0, config, 3)
    run = MemoryRun(0, config)
    run.checkpointer.resume()
    assert run.checkpointer.save_restored(last=False) is None
    assert run.checkpointer.save_restored(last=False, rolls_back=True) is not None
    assert published(config) == [3]
    assert run.checkpointer.resume()
    assert run.driver.step == 3
    run.crash()


def test_a_saved_end_drops_the_snapshots_and_a_crash_keeps_them(tmp_path, base):
    config = in_memory(tmp_path, base)

    def train(error: Exception | None) -> None:
        run = MemoryRun(0, config)
        run.checkpointer.resume()
        with run.checkpointer.committing():
            run.train(1)
            if error is not None:
                raise error

    with pytest.raises(RuntimeError):
        train(RuntimeError("crash"))
    assert snapshots(config) == [1]
    with pytest.raises(UserError):
        train(UserError("mistake"))
    assert snapshots(config) == [2, 1]
    train(None)
    assert snapshots(config) == []


def test_a_full_memory_costs_the_snapshot_and_never_the_run(tmp_path):
    # Two snapshots of about 1.2 MB and the reserve of 1 MiB fit. A third fits only after something is removed.
    with small_disk(tmp_path / "memory", 6) as base:
        config = in_memory(tmp_path, base)
        log = messages()
        run = MemoryRun(0, config)
        run.checkpointer.resume()
        run.train(2)
        fill = base / "fill"
        fill.write_bytes(bytes((6 << 20) - 3 * (1 << 20)))
        run.train(3)
        run.checkpointer._memory.settle()
        failures = run.checkpointer.metrics()["perf/memory_failures"]
        assert failures >= 1
        assert any("The run goes on" in line for line in log)
        fill.unlink()
        run.train(2)
        run.crash()
        assert run.checkpointer.metrics()["perf/memory_failures"] == failures
        assert snapshots(config) == [7, 6]
        assert not [path.name for path in folder_of(config).iterdir() if path.name.startswith(".tmp")]
        assert resume(0, config)[0] == 7


def test_memory_without_room_is_refused_before_the_first_snapshot(tmp_path):
    with small_disk(tmp_path / "memory", 2) as base:
        config = in_memory(tmp_path, base)
        with pytest.raises(UserError, match=r"checkpoint\.memory\.dir=.* free"):
            MemoryRun(0, config).checkpointer.resume()


def test_failures_are_counted_on_all_ranks(tmp_path, base):
    def train(rank: int, config: Config) -> float:
        run = MemoryRun(rank, config)
        run.checkpointer.resume()
        run.train(1)
        run.crash()
        if rank == 0:
            step_dir(folder_of(config), 2).mkdir()  # publication cannot rename
            (step_dir(folder_of(config), 2) / "x").touch()
        run.coordinator.all_gather(None)
        run.train(2)
        run.crash()
        return run.checkpointer.metrics()["perf/memory_failures"]

    config = in_memory(tmp_path, base)
    assert run_thread_ranks(2, train, config) == [1.0, 1.0]


def on_node(rank: int, tmp_path: Path, base: Path, nodes: list[int]) -> Config:
    (base / f"node_{nodes[rank]}").mkdir(exist_ok=True)
    return in_memory(tmp_path, base / f"node_{nodes[rank]}")


def train_on_nodes(rank: int, tmp_path: Path, base: Path, nodes: list[int]) -> dict:
    return begin(rank, on_node(rank, tmp_path, base, nodes), 3, (1,))


def resume_on_nodes(rank: int, tmp_path: Path, base: Path, nodes: list[int]) -> tuple[int, dict]:
    return resume(rank, on_node(rank, tmp_path, base, nodes))[:2]


def test_two_nodes_have_their_parts_in_memory_and_share_a_disk(tmp_path, base):
    before = run_thread_ranks(2, train_on_nodes, tmp_path, base, [0, 1])
    steps = [[step_of(path) for path in scan(next(path.glob("rlhf-*")))] for path in sorted(base.iterdir())]
    assert steps == [[3, 2], [3, 2]]
    for nodes in ([0, 1], [1, 0]):  # swapped: each node reads its ranks' parts from the other node
        for (step, state), expected in zip(
            run_thread_ranks(2, resume_on_nodes, tmp_path, base, nodes), before, strict=True
        ):
            assert step == 3
            assert equal(state, expected)
    shutil.rmtree(base / "node_1")
    assert [step for step, _ in run_thread_ranks(2, resume_on_nodes, tmp_path, base, [0, 1])] == [1, 1]


def test_list_and_verify_show_snapshots_as_not_saved(tmp_path, base, command):
    config = in_memory(tmp_path, base)
    begin(0, config, 3)
    write_run_file(config.run_dir, {"run_id": "r"})
    (config.run_dir / RESOLVED).write_text(to_yaml(config))
    code, output, _ = command("list", str(config.run_dir), "--json")
    [run] = json.loads(output)["runs"]
    assert code == 0
    assert run["checkpoints"] == []
    assert [(row["step"], row["state"]) for row in run["in_memory"]] == [(3, "committed"), (2, "committed")]
    assert "not saved" in command("list", str(config.run_dir))[1]
    assert command("verify", str(config.run_dir))[0] == 0
    path = step_dir(folder_of(config), 3) / "config.yaml"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    code, output, _ = command("verify", str(config.run_dir), "--json")
    assert code == 1
    assert [row["state"] for row in json.loads(output)["checkpoints"]] == ["damaged", "intact"]
    assert command("prune", str(config.run_dir))[0] == 2, "no other verb knows of snapshots"


def test_a_snapshot_that_fails_while_it_loads_does_not_begin_the_run_half_loaded(tmp_path, base):
    """Every byte matches its hash, so only the load finds the wrong content, when the tensors are overwritten."""
    config = in_memory(tmp_path, base)
    begin(0, config, 2)
    for path in scan(folder_of(config)):
        with_hash("actor/extra/lr_scheduler.json", b"{}")(path)
    fresh = MemoryRun(0, config)
    built = fresh.everything()
    fresh.crash()
    with pytest.raises(UserError, match="Every checkpoint"):
        resume(0, config)
    step, state, _ = resume(0, config)
    assert step == 0
    assert equal(state, built)
