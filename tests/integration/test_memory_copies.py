"""Snapshots with copies in other nodes' memory: lost nodes, damaged copies, full memory."""

import shutil
from pathlib import Path

import pytest

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.storage.layout import HISTORY, scan, step_dir, step_of
from tests.support.in_memory import MemoryRun, folder_of, in_memory, memory_base
from tests.support.launching import flip_a_byte
from tests.support.saving_behind import on_ranks
from tests.support.small_disks import small_disk
from tests.support.thread_ranks import messages, run_thread_ranks

PART = "actor/model/rank_00001.safetensors"


@pytest.fixture
def base():
    with memory_base() as folder:
        yield folder


def on_node(tmp_path: Path, base: Path, node: int, copies: int, *, own_disk: bool = False) -> Config:
    """Return the configuration on a node with its own memory, and its own disk if asked for."""
    (base / f"node_{node}").mkdir(exist_ok=True)
    config = in_memory(tmp_path / f"node_{node}" if own_disk else tmp_path, base / f"node_{node}")
    config.checkpoint.memory.replicas = copies
    return config


def begin(rank: int, tmp_path: Path, base: Path, nodes: list[int], copies: int, own_disk: bool = False) -> dict:
    """Start, train three steps with a snapshot each and a checkpoint of step 1, and crash."""
    run = MemoryRun(rank, on_node(tmp_path, base, nodes[rank], copies, own_disk=own_disk))
    run.checkpointer.resume()
    run.train(1)
    run.checkpointer.save(1)
    run.train(2)
    run.crash()
    return run.everything()


def resume(rank: int, tmp_path: Path, base: Path, nodes: list[int], copies: int, own_disk: bool = False) -> tuple:
    """Start again; return the step, the state and the log."""
    log = messages()
    run = MemoryRun(rank, on_node(tmp_path, base, nodes[rank], copies, own_disk=own_disk))
    run.checkpointer.resume()
    step, state = run.driver.step, run.everything()
    run.train(1)
    run.crash()
    return step, state, log


def equal(a: dict, b: dict) -> bool:
    tensors = ("weight", "moment", "reference", "carried")
    return all((a[name] == b[name]).all() for name in tensors) and all(
        a[name] == b[name] for name in a if name not in tensors
    )


def folders(base: Path) -> dict[int, Path]:
    """Return each node's folder of snapshots."""
    return {int(path.parent.name.removeprefix("node_")): path for path in base.glob("node_*/rlhf-*")}


def check(outcomes: list[tuple], expected: list[dict], step: int = 3) -> None:
    for (resumed, state, _), before in zip(outcomes, expected, strict=True):
        assert resumed == step
        assert equal(state, before)


@pytest.mark.parametrize(
    ("nodes", "copies", "lost"),
    [
        ([0, 1], 1, [1]),
        ([0, 0, 1], 1, [0]),
        ([0, 1, 2], 2, [0, 2]),
        ([0, 0, 1, 1, 2], 1, [2]),
    ],
)
def test_lost_memory_is_read_from_the_copies(nodes, copies, lost, tmp_path, base):
    """Promise 21."""
    before = run_thread_ranks(len(nodes), begin, tmp_path, base, nodes, copies)
    for node, folder in folders(base).items():
        assert [step_of(path) for path in scan(folder)] == [3, 2]
        if node in lost:
            shutil.rmtree(base / f"node_{node}")
    check(run_thread_ranks(len(nodes), resume, tmp_path, base, nodes, copies), before)
    # The next snapshot is whole again, on all nodes.
    manifest = read_manifest(step_dir(folders(base)[0], 4))
    assert all(len(entry.get("domains", nodes)) > copies for entry in manifest.files.values())
    for folder in folders(base).values():
        names = manifest.expected_at(step_dir(folder, 4))
        assert all((step_dir(folder, 4) / name).is_file() for name in names)


def test_over_gloo_another_machine_takes_the_place_of_a_lost_one(tmp_path, base):
    before = on_ranks(tmp_path, 2, begin, tmp_path, base, [0, 1], 1)
    shutil.rmtree(base / "node_1")
    check(on_ranks(tmp_path, 2, resume, tmp_path, base, [7, 0], 1), before)


def test_more_lost_nodes_than_copies_leave_the_disk(tmp_path, base):
    run_thread_ranks(3, begin, tmp_path, base, [0, 1, 2], 1)
    shutil.rmtree(base / "node_1")
    shutil.rmtree(base / "node_2")
    outcomes = run_thread_ranks(3, resume, tmp_path, base, [0, 1, 2], 1)
    assert [step for step, *_ in outcomes] == [1, 1, 1]
    assert sum("no node's memory has" in line for line in outcomes[0][2]) == 2


def test_damage_in_one_copy_is_found_and_the_other_copy_used(tmp_path, base):
    """Promise 4. Damage in both copies leaves the older snapshot."""
    before = run_thread_ranks(2, begin, tmp_path, base, [0, 1], 1)
    kept = tmp_path / "kept"
    shutil.copytree(base, kept)
    newest = {node: step_dir(folder, 3) for node, folder in folders(base).items()}
    names = sorted(read_manifest(newest[0]).files)
    assert PART in names
    assert "driver_state.json" in names
    for name, node in ((PART, 0), (PART, 1), ("driver_state.json", 0), ("manifest.json", 1)):
        shutil.rmtree(base)
        shutil.copytree(kept, base)
        flip_a_byte(newest[node] / name)
        outcomes = run_thread_ranks(2, resume, tmp_path, base, [0, 1], 1)
        check(outcomes, before)
        told = [line for line in outcomes[0][2] if f"damaged on the node of rank {node}" in line and name in line]
        assert len(told) == (name != "manifest.json")
    shutil.rmtree(base)
    shutil.copytree(kept, base)
    for path in newest.values():
        flip_a_byte(path / PART)
    assert [step for step, *_ in run_thread_ranks(2, resume, tmp_path, base, [0, 1], 1)] == [2, 2]


def test_a_node_that_is_lost_with_its_disk_costs_no_step(tmp_path, base):
    """Without a shared disk, the checkpoints on disk lack the lost node's files, and the snapshot does not."""
    for lost in (1, 0):
        run_dir, memory = tmp_path / f"lost_{lost}", base / f"lost_{lost}"
        run_dir.mkdir()
        memory.mkdir()
        before = run_thread_ranks(2, begin, run_dir, memory, [0, 1], 1, True)
        shutil.rmtree(memory / f"node_{lost}")
        shutil.rmtree(run_dir / f"node_{lost}")
        outcomes = run_thread_ranks(2, resume, run_dir, memory, [0, 1], 1, True)
        check(outcomes, before)
        assert any("history was lost" in line for line in outcomes[0][2]) == (lost == 0)


def test_a_history_that_is_gone_from_a_shared_disk_rejects_the_snapshot(tmp_path, base):
    run_thread_ranks(2, begin, tmp_path, base, [0, 1], 1)
    (on_node(tmp_path, base, 0, 1).run_dir / HISTORY).unlink()
    assert [step for step, *_ in run_thread_ranks(2, resume, tmp_path, base, [0, 1], 1)] == [1, 1]


def test_full_memory_of_one_node_costs_the_snapshot_only(tmp_path, base):
    def train(rank: int, copies: int) -> tuple[float, float]:
        config = on_node(tmp_path, base, rank, copies)
        run = MemoryRun(rank, config)
        run.checkpointer.resume()
        run.train(2)
        run.crash()
        fill = base / "node_1" / "fill"
        if rank == 1:
            free = shutil.disk_usage(base / "node_1").free
            fill.write_bytes(bytes(free - (1 << 20)))
        run.coordinator.all_gather(None)
        run.train(1)
        run.crash()
        failed = run.checkpointer.metrics()["perf/memory_failures"]
        run.coordinator.all_gather(None)
        fill.unlink(missing_ok=True)
        run.coordinator.all_gather(None)
        run.train(1)
        run.crash()
        return failed, run.checkpointer.metrics()["perf/memory_failures"]

    with small_disk(base / "node_1", 16):
        assert run_thread_ranks(2, train, 1) == [(1.0, 1.0)] * 2
        steps = {node: [step_of(path) for path in scan(folder)] for node, folder in folders(base).items()}
        assert steps == {0: [4, 2], 1: [4, 2]}


def test_copies_need_as_many_other_folders(tmp_path, base, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    def start(rank: int) -> str:
        config = on_node(tmp_path, base, 0, 1)
        with pytest.raises(UserError) as error:
            MemoryRun(rank, config)
        return str(error.value)

    first, second = run_thread_ranks(2, start)
    assert first == second
    assert "checkpoint.memory.replicas=0, or checkpoint.memory.dir" in first


def test_a_run_with_fewer_machines_makes_fewer_copies(tmp_path, base, monkeypatch):
    """As with `launcher.min_nodes` under Ray: one machine of two is left, with both ranks of its own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def start(rank: int) -> int:
        run = MemoryRun(rank, on_node(tmp_path, base, 0, 1))
        run.checkpointer.resume()
        run.train(2)
        run.crash()
        return len(list(scan(run.checkpointer._memory.place.folder)))

    assert run_thread_ranks(2, start) == [2, 2]


def test_room_counts_the_copies(tmp_path, base):
    def start(rank: int, copies: int) -> str | None:
        config = on_node(tmp_path, base, rank, copies)
        try:
            MemoryRun(rank, config).checkpointer.resume()
        except UserError as error:
            return str(error)
        return None

    with small_disk(base / "node_0", 3), small_disk(base / "node_1", 3):
        assert run_thread_ranks(2, start, 0) == [None, None]
        shutil.rmtree(on_node(tmp_path, base, 0, 0).run_dir)
        for refused in run_thread_ranks(2, start, 1):
            assert refused is not None
            assert "another node" in refused
            assert "checkpoint.memory.replicas=0" in refused


def test_the_end_of_a_run_removes_the_copies(tmp_path, base):
    def train(rank: int) -> list[Path]:
        config = on_node(tmp_path, base, rank, 1)
        run = MemoryRun(rank, config)
        run.checkpointer.resume()
        with run.checkpointer.committing():
            run.train(2)
        return scan(folder_of(config))

    assert run_thread_ranks(2, train) == [[], []]
