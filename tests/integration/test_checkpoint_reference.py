"""A moving reference policy: stored once per change, shared by hard links, correct after every fallback, and deleted
with the last checkpoint that uses it."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import TEMPORARY, TRASH, scan, step_dir, step_of
from tests.support.checkpoints import (
    PlainReference,
    PlainRole,
    even_range,
    files_of,
    flip_bit,
    make_checkpointer,
    make_config,
    make_driver,
    resume,
    run_ranks,
)
from tests.support.sections import prepare
from tests.support.thread_ranks import make_coordinator, run_thread_ranks, subscribe
from tests.support.verified import verify

DEADLINE_S = 90
SIZE = 5000
SAVE_EVERY, UPDATE_EVERY = 2, 5
FOLDER = "ref/model"


@pytest.fixture
def config(tmp_path) -> Config:
    config = make_config(tmp_path)
    config.checkpoint.max_to_keep = None
    return config


def ranks(world_size: int, function, *arguments) -> list:
    return run_thread_ranks(world_size, function, *arguments, deadline_s=DEADLINE_S)


@pytest.fixture
def processes(tmp_path):
    def run(world_size: int, function, *arguments) -> list:
        join = Path(tempfile.mkdtemp(dir=tmp_path))
        return run_ranks(world_size, function, *arguments, deadline_s=DEADLINE_S, join=join)

    return run


def train(rank: int, config: Config, last: int, lose: int | None = None, die_at: str | None = None) -> list:
    """Resume and train to step `last`.

    Before the save of step `lose`, the previous checkpoint disappears.

    Returns:
        Step, the reference's last update (a step) and weights after the resume; update and weights at the end.
    """
    coordinator, driver = make_coordinator(), make_driver()
    world_size = coordinator.world_size
    role, reference = PlainRole(SIZE, rank, world_size), PlainReference(SIZE, rank, world_size)
    parts = {"reference": reference}
    checkpointer = make_checkpointer(
        config, role, coordinator=coordinator, driver=driver, parts=parts, reference=reference
    )
    checkpointer.resume()
    found = [driver.step, reference.updated_at, reference.weight.clone()]
    if die_at is not None and rank == 0:
        subscribe(lambda event: os._exit(9) if event == die_at else None)
    while driver.step < last:
        driver.step += 1
        role.weight += 1
        if driver.step % UPDATE_EVERY == 0:
            reference.update(driver.step)
        if driver.step == lose and rank == 0:
            step_dir(config.run_dir, lose - SAVE_EVERY).rename(config.run_dir / "elsewhere")
        if driver.step % SAVE_EVERY == 0:
            checkpointer.save(driver.step)
    checkpointer.finish()  # also finishes the removals
    return [*found, reference.updated_at, reference.weight]


def updated_at(step: int) -> int:
    return step - step % UPDATE_EVERY


def expected(step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    """Return this rank's part of the reference after `step`."""
    return even_range(SIZE, rank, world_size, seed=updated_at(step))[0]


def steps(config: Config) -> list[int | None]:
    return [step_of(path) for path in scan(config.run_dir)]


def weights(config: Config, step: int, rank: int = 0) -> Path:
    return step_dir(config.run_dir, step) / FOLDER / f"rank_{rank:05d}.safetensors"


def inodes(config: Config, step: int) -> dict[str, int]:
    folder = step_dir(config.run_dir, step) / FOLDER
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def bytes_on_disk(config: Config) -> int:
    """Return the bytes of all files in the run directory. Each inode counts once."""
    stats = [path.stat() for path in config.run_dir.rglob("*") if path.is_file()]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_change_is_written_once_and_linked_from_then_on(config, processes, world_size):
    processes(world_size, train, config, 14)
    linked = {4: 2, 8: 6, 12: 10, 14: 12}
    names = {"index.safetensors", *(f"rank_{rank:05d}.safetensors" for rank in range(world_size))}
    for step in range(2, 15, 2):
        path = step_dir(config.run_dir, step)
        manifest = verify(path)
        assert {name for name in manifest.files if name.startswith("ref/")} == {f"{FOLDER}/{name}" for name in names}
        assert manifest.linked == ({FOLDER: f"global_step_{linked[step]}"} if step in linked else {})
        own = sum((path / name).stat().st_size for name in manifest.files if not name.startswith("ref/"))
        shared = sum((path / FOLDER / name).stat().st_size for name in names)
        assert shared > 4 * SIZE
        assert manifest.linked_bytes == (shared if step in linked else 0)
        assert manifest.total_bytes == (own if step in linked else own + shared)
        if step in linked:
            assert inodes(config, step) == inodes(config, linked[step])
        elif step > 2:
            assert not set(inodes(config, step).values()) & set(inodes(config, step - 2).values())
    # The bytes that the manifests list as written are the bytes on the disk.
    manifests = [step_dir(config.run_dir, step) / "manifest.json" for step in range(2, 15, 2)]
    others = [config.run_dir / name for name in ("latest_checkpointed_iteration.txt", "events.jsonl")]
    rest = sum(path.stat().st_size for path in [*manifests, *others])
    assert bytes_on_disk(config) == rest + sum(read_manifest(path.parent).total_bytes for path in manifests)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_reference_that_no_checkpoint_uses_is_deleted(config, world_size):
    config.checkpoint.max_to_keep = 2
    ranks(world_size, train, config, 10)
    with weights(config, 10).open("rb") as file:
        seen = []
        for last in (10, 12, 14, 16, 18):
            ranks(world_size, train, config, last)
            seen.append((os.fstat(file.fileno()).st_nlink, steps(config)))
    # The reference of step 10 lasts until 15. Its file has one name per checkpoint, also after step 10 is removed.
    assert seen == [(1, [10, 8]), (2, [12, 10]), (2, [14, 12]), (1, [16, 14]), (0, [18, 16])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_falling_back_two_checkpoints_restores_that_reference(config, world_size):
    ranks(world_size, train, config, 12)
    for step in (10, 12):
        flip_bit(step_dir(config.run_dir, step) / "driver_state.json", 30)
    for rank, (step, changed, weight, *end) in enumerate(ranks(world_size, train, config, 9)):
        assert (step, changed) == (8, 5)
        assert torch.equal(weight, expected(8, rank, world_size))
        assert end[0] == 5
    # From there the run equals an undisturbed run.
    for rank, (*_, changed, weight) in enumerate(ranks(world_size, train, config, 12)):
        assert changed == 10
        assert torch.equal(weight, expected(12, rank, world_size))
    assert steps(config) == [12, 10, 8, 6, 4, 2]
    assert read_manifest(step_dir(config.run_dir, 10)).linked == {}
    assert read_manifest(step_dir(config.run_dir, 12)).linked == {FOLDER: "global_step_10"}


def test_after_a_resume_the_stored_reference_is_linked_again(config):
    for last in (6, 8, 9, 9):
        ranks(2, train, config, last)
    assert read_manifest(step_dir(config.run_dir, 8)).linked == {FOLDER: "global_step_6"}
    assert inodes(config, 6) == inodes(config, 8)


def test_damage_in_a_shared_file_is_damage_to_all_that_share_it(config):
    ranks(2, train, config, 14)
    flip_bit(weights(config, 12, rank=1), 4000)
    for step in (10, 12, 14):
        with pytest.raises(DamagedCheckpoint, match=r"ref/model/rank_00001\.safetensors: content differs"):
            verify(step_dir(config.run_dir, step))
    for rank, (step, changed, weight, *_) in enumerate(ranks(2, train, config, 8)):
        assert (step, changed) == (8, 5)
        assert torch.equal(weight, expected(8, rank, 2))
    assert steps(config) == [8, 6, 4, 2]
    assert len(list(config.run_dir.glob("global_step_*.damaged-1"))) == 3
    # No new checkpoint links a file of a checkpoint that was set aside.
    ranks(2, train, config, 12)
    assert not set(inodes(config, 10).values()) & {
        path.stat().st_ino for path in config.run_dir.glob("*.damaged-1/ref/model/*")
    }


def test_another_world_size_reads_and_links_what_the_first_one_wrote(config):
    ranks(2, train, config, 6)
    [(step, changed, weight, *_)] = ranks(1, train, config, 8)
    assert (step, changed) == (6, 5)
    assert torch.equal(weight, expected(6))
    # One rank wrote step 8, which links the two rank files of step 6.
    assert inodes(config, 8) == inodes(config, 6)
    assert verify(step_dir(config.run_dir, 8)).world_size == 1
    assert len(inodes(config, 8)) == 3
    for rank, (step, changed, weight, *_) in enumerate(ranks(2, train, config, 9)):
        assert (step, changed) == (8, 5)
        assert torch.equal(weight, expected(8, rank, 2))
    ranks(1, train, config, 10)
    assert len(inodes(config, 10)) == 2
    for rank, (step, _, weight, *_) in enumerate(ranks(2, train, config, 10)):
        assert step == 10
        assert torch.equal(weight, expected(10, rank, 2))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_reference_whose_link_source_is_gone_is_written(config, world_size):
    ranks(world_size, train, config, 8, 8)
    manifest = verify(step_dir(config.run_dir, 8))
    assert manifest.linked == {}
    assert manifest.world_size == world_size
    for rank, (step, _, weight, *_) in enumerate(ranks(world_size, train, config, 8)):
        assert step == 8
        assert torch.equal(weight, expected(8, rank, world_size))


@pytest.mark.parametrize("code", ["EXDEV", "EPERM", "EMLINK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS"])
@pytest.mark.parametrize("at", [1, 2])
def test_where_links_cannot_be_made_the_bytes_are_written(config, monkeypatch, caplog, code, at):
    calls = []

    def link(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == at:
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), str(source))
        make_link(source, target)

    make_link = os.link
    train(0, config, 2)
    monkeypatch.setattr(os, "link", link)
    train(0, config, 4)
    assert len(calls) == at
    manifest = verify(step_dir(config.run_dir, 4))
    assert manifest.linked == {}
    assert manifest.total_bytes == sum(entry["size"] for entry in manifest.files.values())
    assert not set(inodes(config, 2).values()) & set(inodes(config, 4).values())
    assert weights(config, 2).read_bytes() == weights(config, 4).read_bytes()
    [line] = [record.getMessage() for record in caplog.records if "ref/model" in record.getMessage()]
    assert f"the save writes it again: [Errno {getattr(errno, code)}]" in line
    # The next save that can link tries again.
    train(0, config, 8)
    assert verify(step_dir(config.run_dir, 8)).linked == {FOLDER: "global_step_6"}


def fork(config: Config, folder: Path, step: int) -> Config:
    """Prepare a run in `folder` that starts from `step` of the run of `config`. Return its configuration."""
    forked = make_config(folder)
    forked.checkpoint.max_to_keep = None
    forked.trainer.resume_mode = "resume_path"
    forked.trainer.resume_from_path = str(step_dir(config.run_dir, step))
    prepare(forked)
    return forked


def test_a_fork_in_another_directory_shares_the_files_of_its_source(config, tmp_path):
    ranks(2, train, config, 6)
    forked = fork(config, tmp_path / "other", 6)
    for rank, (step, changed, weight, *_) in enumerate(ranks(2, train, forked, 8)):
        assert (step, changed) == (6, 5)
        assert torch.equal(weight, expected(6, rank, 2))
    assert read_manifest(step_dir(forked.run_dir, 8)).linked == {FOLDER: str(step_dir(config.run_dir, 6))}
    assert inodes(forked, 8) == inodes(config, 6)
    # The source run may delete its own checkpoints.
    config.trainer.overwrite = True
    prepare(config)
    assert verify(step_dir(forked.run_dir, 8)).step == 8
    assert weights(forked, 8).stat().st_nlink == 1


def test_a_fork_on_another_file_system_writes_the_reference_once_more(config):
    shared_memory = Path("/dev/shm")
    ranks(2, train, config, 6)
    if not os.access(shared_memory, os.W_OK) or shared_memory.stat().st_dev == config.run_dir.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory) as folder:
        forked = fork(config, Path(folder), 6)
        ranks(2, train, forked, 9)
        assert verify(step_dir(forked.run_dir, 8)).linked == {}
        for rank, (step, changed, weight, *_) in enumerate(ranks(2, train, forked, 9)):
            assert (step, changed) == (8, 5)
            assert torch.equal(weight, expected(8, rank, 2))


def test_a_kill_between_links_leaves_all_as_it_was(config, processes):
    ranks(2, train, config, 6)
    before = files_of(config.run_dir), inodes(config, 6)
    assert processes(1, train, config, 8, None, "commit.link") == ["died"]
    [leftover] = [path.name for path in config.run_dir.iterdir() if path.name.startswith((TEMPORARY, TRASH))]
    assert leftover.startswith(".tmp-global_step_8-")
    prepare(config)
    (config.run_dir / "run.json").unlink()
    assert (files_of(config.run_dir), inodes(config, 6)) == before
    assert weights(config, 6).stat().st_nlink == 1
    assert ranks(2, train, config, 8)[0][0] == 6


@pytest.mark.parametrize("contents", [["model"], ["hf_model"], ["model", "optimizer", "extra", "hf_model"], ["extra"]])
def test_the_reference_is_in_every_checkpoint_with_weights(config, contents):
    config.checkpoint.contents = contents
    train(0, config, 2)
    has_weights = {"model", "hf_model"} & set(contents)
    assert weights(config, 2).exists() == bool(has_weights)
    if has_weights:
        assert train(0, config, 2)[:2] == [2, 0]


def test_a_frozen_reference_is_not_stored(config):
    make_checkpointer(config, PlainRole(), 2).save(2)
    assert not (step_dir(config.run_dir, 2) / "ref").exists()


@pytest.mark.parametrize("allow", [False, True])
def test_a_checkpoint_without_the_reference_that_is_asked_for_is_refused(config, allow):
    make_checkpointer(config, PlainRole(), 2).save(2)
    config.ref.update_freq = 5
    config.trainer.allow_config_change = allow
    reference = PlainReference()
    with pytest.raises(UserError, match=r"ref\.update_freq=5 asks|ref\.update_freq: null in the checkpoint, 5 now"):
        resume(config, PlainRole(), reference=reference)
    assert reference.updated_at == 0


def test_a_checkpoint_of_step_0_is_restored_and_linked_like_others(config):
    config.checkpoint.max_to_keep = 2
    driver, reference = make_driver(), PlainReference()
    parts = {"reference": reference}
    checkpointer = make_checkpointer(config, PlainRole(), driver=driver, parts=parts, reference=reference)
    assert checkpointer.resume() is False
    checkpointer.save(0)
    assert steps(config) == [0]
    assert verify(step_dir(config.run_dir, 0)).linked == {}
    start = reference.weight.clone()
    driver.step = 5
    reference.update(5)
    assert checkpointer.resume() is True
    assert (driver.step, reference.updated_at) == (0, 0)
    assert torch.equal(reference.weight, start)
    for driver.step in (1, 2):
        checkpointer.save(driver.step)
    checkpointer.finish()  # empties the trash
    assert steps(config) == [2, 1]
    # Step 0 wrote the file. Retention removed step 0, so the names of steps 1 and 2 are left.
    assert weights(config, 2).stat().st_nlink == 2
