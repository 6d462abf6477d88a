"""200 random bit flips over all files of a real checkpoint: each flip is detected, and a resume falls back to the
checkpoint before."""

import errno
import logging
import os
import random
import shutil
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import POINTER, scan, step_dir
from tests.support.checkpoints import (
    equal_bits,
    files_of,
    flip_bit,
    lose_on_disk,
    make_backend,
    make_checkpointer,
    make_config,
    resume,
    whole_state,
    world_of_one,
)
from tests.support.verified import verify

FLIPS = 200
SEED = 20


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with the checkpoints of steps 2 and 4, and their states."""
    folder = tmp_path_factory.mktemp("bit_flips")
    with world_of_one(folder):
        config = make_config(folder)
        config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
        states = {}
        for step in (2, 4):
            backend = make_backend(1, train_steps=step)
            make_checkpointer(config, backend, step).save(step)
            states[step] = whole_state(backend)
        yield config.run_dir, states


@pytest.fixture
def config(original, tmp_path) -> Config:
    """A copy of the run, for damage."""
    config = make_config(tmp_path)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    shutil.copytree(original[0], config.run_dir)
    return config


def choose_flips(checkpoint: Path) -> list[tuple[str, int]]:
    """Return the flips: one or more in every file, the others in proportion to size. Any bit may
    flip, also a file's last."""
    rng = random.Random(SEED)
    sizes = {name: 8 * (checkpoint / name).stat().st_size for name in sorted(files_of(checkpoint))}
    chosen = list(sizes) + rng.choices(list(sizes), weights=list(sizes.values()), k=FLIPS - len(sizes))
    return [(name, rng.randrange(sizes[name])) for name in chosen]


def test_every_flip_is_detected(config):
    # Promise 4.
    checkpoint = step_dir(config.run_dir, 4)
    flips = choose_flips(checkpoint)
    assert len(flips) == FLIPS
    assert {name for name, _ in flips} == files_of(checkpoint)
    assert len(files_of(checkpoint)) >= 14
    for name, bit in flips:
        flip_bit(checkpoint / name, bit)
        with pytest.raises(DamagedCheckpoint, match=name):
            verify(checkpoint)
        flip_bit(checkpoint / name, bit)
    assert verify(checkpoint).step == 4


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "driver_state.json",
        "config.yaml",
        "rng/rank_00000.safetensors",
        "actor/model/rank_00000.safetensors",
        "actor/optimizer/index.safetensors",
        "actor/huggingface/model.safetensors",
    ],
)
def test_resume_falls_back_to_the_one_before(original, config, caplog, name):
    # Promise 4.
    path = step_dir(config.run_dir, 4) / name
    flip_bit(path, random.Random(name).randrange(8 * path.stat().st_size))
    before = path.read_bytes()
    backend = make_backend(2)
    with caplog.at_level(logging.INFO, logger="rlhf"):
        step = resume(config, backend)
    assert step == 2
    assert equal_bits(whole_state(backend), original[1][2])
    kept = config.run_dir / "global_step_4.damaged-1"
    assert (kept / name).read_bytes() == before
    assert [path.name for path in scan(config.run_dir)] == ["global_step_2"]
    assert (config.run_dir / POINTER).read_text() == "2\n"
    [report] = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert name in report
    assert "It was set aside as global_step_4.damaged-1; falling back" in report
    # The run can reach step 4 again and save it beside the damaged checkpoint.
    make_checkpointer(config, backend, 4).save(4)
    assert resume(config, backend) == 4


def test_an_intact_run_resumes_from_its_newest_checkpoint_without_warnings(original, config, caplog):
    backend = make_backend(2)
    assert resume(config, backend) == 4
    assert equal_bits(whole_state(backend), original[1][4])
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_all_damaged_is_an_error_at_every_start_never_a_fresh_run(config):
    # Promise 5.
    for step in (2, 4):
        flip_bit(step_dir(config.run_dir, step) / "actor/model/rank_00000.safetensors", 8000)
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            resume(config, make_backend(2))
        for part in ("global_step_2.damaged-1", "global_step_4.damaged-1", "step 0", "trainer.overwrite=true"):
            assert part in str(caught.value)


@pytest.fixture
def broken_disk(config, monkeypatch) -> Path:
    """Reads of the newest checkpoint's optimizer fail with an input/output error, and its directory cannot be
    renamed."""
    checkpoint = step_dir(config.run_dir, 4)
    rename = Path.rename

    def failing(path: Path, to: Path) -> Path:
        if path == checkpoint:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return rename(path, to)

    lose_on_disk(monkeypatch, checkpoint / "actor/optimizer/rank_00000.safetensors", errno.EIO)
    monkeypatch.setattr(Path, "rename", failing)
    return checkpoint


def test_a_checkpoint_that_cannot_be_read_or_set_aside_is_skipped(original, config, broken_disk, caplog):
    backend = make_backend(2)
    for _ in range(2):
        caplog.clear()
        assert resume(config, backend) == 2
        assert equal_bits(whole_state(backend), original[1][2])
        assert "rank_00000.safetensors: cannot be read: Input/output error. It cannot be set aside (" in caplog.text
        assert "; falling back to the checkpoint before it." in caplog.text
    assert [path.name for path in scan(config.run_dir)] == ["global_step_4", "global_step_2"]


def test_an_unreadable_last_checkpoint_is_an_error_and_no_fresh_run(config, broken_disk):
    shutil.rmtree(step_dir(config.run_dir, 2))
    for _ in range(2):
        with pytest.raises(UserError, match=r"is damaged \(global_step_4\)"):
            resume(config, make_backend(2))


def test_a_wrong_or_missing_pointer_is_only_a_hint(config):
    for content in ("2\n", "900\n", "garbage", ""):
        (config.run_dir / POINTER).write_text(content)
        assert resume(config, make_backend(2)) == 4
    (config.run_dir / POINTER).unlink()
    assert resume(config, make_backend(2)) == 4
