"""Nodes with their own disks, as folders: a run detects them, saves in parts and resumes in any order of nodes.
It has one history and one run id."""

import json
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.start import domains as storage_domains
from rlhf.checkpoint.start import preparation
from rlhf.checkpoint.start.domains import find_domains
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.storage.files import remove_file
from rlhf.storage.layout import CONFIG, DRIVER_STATE, HISTORY, MANIFEST, RUN_FILE, scan, set_aside_dirs, step_dir
from tests.support.checkpoints import equal_bits, files_of
from tests.support.nodes import on_node, resume, save, start
from tests.support.saving_behind import on_ranks, published
from tests.support.sections import finished_step
from tests.support.thread_ranks import make_coordinator, replaced, run_thread_ranks
from tests.support.verified import verify


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorten the wait before a second look: no folder here shows a file late. Processes keep the real wait."""
    monkeypatch.setattr(storage_domains, "LOOK_AGAIN_S", 0.001)


def look(rank: int, tmp_path: Path, nodes: list[int]) -> tuple[list[int], list[int], bool, list[int], list[str]]:
    config = on_node(tmp_path, nodes[rank])
    coordinator = make_coordinator()
    coordinator.domains = find_domains(config.run_dir, coordinator)
    acted = coordinator.on_domain_leaders(lambda: rank)
    left = sorted(path.name for path in config.run_dir.iterdir())
    return coordinator.domains, coordinator.domain_leaders, coordinator.leads_domain, acted, left


@pytest.mark.parametrize(
    ("nodes", "domains"), [([0, 0], [0, 0]), ([0, 1], [0, 1]), ([0, 1, 0, 1], [0, 1, 0, 1]), ([2, 1, 1], [0, 1, 1])]
)
def test_ranks_detect_which_ranks_share_a_disk(tmp_path, nodes, domains):
    leaders = sorted(set(domains))
    for rank, seen in enumerate(run_thread_ranks(len(nodes), look, tmp_path, nodes)):
        assert seen[:4] == (domains, leaders, rank in leaders, leaders)
        assert seen[4] == []


def go_on(rank: int, config: Config) -> list[str]:
    """Return the files that a rank finds after `find_domains`. Rank 1 removes its token late."""
    coordinator = make_coordinator()

    def late(path: Path) -> None:
        time.sleep(0.02)
        remove_file(path)

    with replaced(storage_domains, "remove_file", late) if rank == 1 else nullcontext():
        find_domains(config.run_dir, coordinator)
    return sorted(path.name for path in config.run_dir.iterdir())


def test_the_first_rank_removes_no_token_in_use(tmp_path):
    """Regression: the first rank once removed tokens in use, and half of the starts of eight ranks failed."""
    assert run_thread_ranks(4, go_on, on_node(tmp_path, 0)) == [[]] * 4


def test_each_disk_has_its_part_and_nodes_may_be_swapped(tmp_path):
    saved = on_ranks(tmp_path, 2, save, tmp_path, [0, 1], 5)
    run_dirs = [on_node(tmp_path, node).run_dir for node in (0, 1)]
    files = [files_of(step_dir(run_dir, 5)) for run_dir in run_dirs]
    own = [{n for n in names if n.endswith(f"rank_{rank:05d}.safetensors")} for rank, names in enumerate(files)]
    assert all(len(names) == 5 for names in own)
    # Every node has the files that a resume needs on every node. A rank's own files are only on its node.
    everywhere = files[0] & files[1]
    assert {
        MANIFEST,
        CONFIG,
        DRIVER_STATE,
        "actor/extra/lr_scheduler.json",
        "actor/model/index.safetensors",
    } <= everywhere
    assert files[0] == everywhere | own[0]
    assert files[1] == everywhere | own[1]
    assert len({(step_dir(run_dir, 5) / MANIFEST).read_bytes() for run_dir in run_dirs}) == 1
    manifest = verify(step_dir(run_dirs[1], 5))
    assert manifest.files.keys() == (files[0] | files[1]) - {MANIFEST}
    assert manifest.total_bytes == sum(entry["size"] for entry in manifest.files.values())
    assert len({(run_dir / RUN_FILE).read_text() for run_dir in run_dirs}) == 1
    # On each disk, the reference of step 5 is new, and step 4 links the reference of step 3.
    assert verify(step_dir(run_dirs[0], 4)).linked == {"ref/model": "global_step_3"}
    for run_dir, rank in zip(run_dirs, (0, 1), strict=True):
        shared = [step_dir(run_dir, step) / f"ref/model/rank_{rank:05d}.safetensors" for step in (3, 4)]
        assert shared[0].samefile(shared[1])
    # Each disk has the newest three checkpoints, and the pointer to the newest.
    assert [published(on_node(tmp_path, node)) for node in (0, 1)] == [[5, 4, 3]] * 2
    assert {(run_dir / "latest_checkpointed_iteration.txt").read_text() for run_dir in run_dirs} == {"5\n"}

    processes = partial(on_ranks, tmp_path)
    for start_ranks, nodes in (
        (run_thread_ranks, [0, 1]),
        (processes, [1, 0]),
        (run_thread_ranks, [1, 0]),
        (run_thread_ranks, [0, 1]),
    ):
        outcomes = start_ranks(2, resume, tmp_path, nodes)
        assert [outcome[0] for outcome in outcomes] == [True, True]
        for rank in (0, 1):
            assert equal_bits(outcomes[rank][1], saved[rank])
        # Only the driver's disk has the history. Fetched files are removed, and no checkpoint has new files.
        assert [(on_node(tmp_path, node).run_dir / HISTORY).exists() for node in nodes] == [True, False]
        assert not [path for run_dir in run_dirs for path in run_dir.glob(".tmp-*")]
        assert [files_of(step_dir(run_dir, 5)) for run_dir in run_dirs] == files


def test_a_run_with_swapped_nodes_continues_saving(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "PART", 5)  # send the history, which follows the driver, in small parts
    run_thread_ranks(2, save, tmp_path, [0, 1], 2)
    saved = run_thread_ranks(2, save, tmp_path, [1, 0], 2)
    manifest = read_manifest(step_dir(on_node(tmp_path, 0).run_dir, 4))
    assert manifest.linked == {"ref/model": "global_step_3"}
    outcomes = run_thread_ranks(2, resume, tmp_path, [0, 1])
    assert [equal_bits(outcome[1], saved[rank]) for rank, outcome in enumerate(outcomes)] == [True, True]
    history = (on_node(tmp_path, 0).run_dir / HISTORY).read_text().splitlines()
    assert [json.loads(line)["step"] for line in history] == [1, 2, 3, 4]


def test_other_numbers_of_ranks_and_disks(tmp_path):
    """Save with four ranks on two nodes. Resume with two ranks, then with three ranks of which two share a disk."""
    run_thread_ranks(4, save, tmp_path, [0, 1, 0, 1], 1)
    assert {"rng/rank_00001.safetensors", "rng/rank_00003.safetensors"} == {
        name for name in files_of(step_dir(on_node(tmp_path, 1).run_dir, 1)) if name.startswith("rng/")
    }
    two = run_thread_ranks(2, resume, tmp_path, [1, 0])
    three = run_thread_ranks(3, resume, tmp_path, [0, 0, 1])
    for name in ("weight", "moment", "reference"):
        whole = [[value for outcome in outcomes for value in outcome[1][name].tolist()] for outcomes in (two, three)]
        assert len(whole[0]) == 100_000
        assert whole[0] == whole[1]
    assert [outcome[1]["driver"]["step"] for outcome in three] == [1, 1, 1]


def test_parts_in_one_folder_are_a_whole_checkpoint(tmp_path):
    run_thread_ranks(2, save, tmp_path, [0, 1], 1)
    parts = [step_dir(on_node(tmp_path, node).run_dir, 1) for node in (0, 1)]
    for name in files_of(parts[1]) - files_of(parts[0]):
        (parts[0] / name).write_bytes((parts[1] / name).read_bytes())
    outcomes = run_thread_ranks(1, resume, tmp_path, [0])
    assert outcomes[0][0]
    with pytest.raises(AssertionError, match=r"is not complete: no node.s disk has .*rank_00000"):
        run_thread_ranks(1, resume, tmp_path, [1])
    assert scan(parts[1].parent)
    assert not set_aside_dirs(parts[1].parent, "damaged")


def save_for_others(rank: int, tmp_path: Path, nodes: list[int], contents: list[str]) -> tuple[bool, dict]:
    """Resume if there is a checkpoint. Otherwise save a step whose weights are only in a Hugging Face folder."""
    config = on_node(tmp_path, nodes[rank])
    config.checkpoint.contents = contents
    run = start(rank, config)
    resumed = run.checkpointer.resume()
    if not resumed:
        run.checkpointer.save(run.step())
        run.checkpointer.finish()
    return resumed, run.everything()


def test_export_is_whole_on_the_driver_s_disk_and_every_node_goes_on_from_it(tmp_path):
    contents = ["hf_model", "optimizer", "extra"]
    saved = on_ranks(tmp_path, 3, save_for_others, tmp_path, [0, 1, 0], contents)
    steps = [step_dir(on_node(tmp_path, node).run_dir, 1) for node in (0, 1)]
    weights = "actor/huggingface/model.safetensors"
    assert weights in files_of(steps[0]) - files_of(steps[1])
    assert torch.equal(load_file(steps[0] / weights)["weight"], torch.cat([state["weight"] for _, state in saved]))
    again = on_ranks(tmp_path, 3, save_for_others, tmp_path, [1, 0, 1], contents)
    assert [resumed for resumed, _ in again] == [True] * 3
    assert equal_bits([state["weight"] for _, state in again], [state["weight"] for _, state in saved])


def roll_back(rank: int, tmp_path: Path) -> tuple[bool, bool]:
    run = start(rank, on_node(tmp_path, rank))
    run.checkpointer.save(run.step())
    saved = run.everything()
    run.step()
    return run.checkpointer.resume(), equal_bits(run.everything(), saved)


def test_a_roll_back_in_the_running_process(tmp_path):
    assert run_thread_ranks(2, roll_back, tmp_path) == [(True, True)] * 2


def finished(rank: int, tmp_path: Path, nodes: list[int]) -> int | None:
    config = on_node(tmp_path, nodes[rank])
    config.trainer.total_training_steps = 2
    coordinator = make_coordinator()
    coordinator.domains = find_domains(config.run_dir, coordinator)
    return finished_step(config, coordinator)


def test_a_finished_run_is_recognised_on_separate_disks(tmp_path):
    run_thread_ranks(2, save, tmp_path, [0, 1], 1)
    assert run_thread_ranks(2, finished, tmp_path, [0, 1]) == [None, None]
    run_thread_ranks(2, save, tmp_path, [0, 1], 1)
    assert run_thread_ranks(2, finished, tmp_path, [1, 0]) == [2, 2]


def start_error(rank: int, tmp_path: Path) -> str:
    config = on_node(tmp_path, rank)
    config.checkpoint.remote = f"file://{tmp_path}/remote"
    with pytest.raises(UserError) as raised:
        start(rank, config)
    return str(raised.value)


def test_a_remote_needs_one_disk(tmp_path):
    for text in run_thread_ranks(2, start_error, tmp_path):
        assert "checkpoint.remote=file://" in text
        assert "trainer.default_local_dir" in text
