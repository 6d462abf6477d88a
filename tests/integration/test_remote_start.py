"""Starts on an empty disk from copies in a remote folder, whole, damaged, or of another run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.checkpoint.commit.manifest import read_manifest, write_manifest
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import DRIVER_STATE, HISTORY, MANIFEST, RUN_FILE, scan, step_dir
from tests.support.checkpoints import PlainRole, make_checkpointer
from tests.support.launching import flip_a_byte
from tests.support.refusals import says
from tests.support.remotes import (
    assert_same_files,
    complete_steps,
    copy_all,
    identify,
    long_retries,
    make_run,
    on_empty_disk,
    remote_dir,
    save,
    start_from_remote,
)
from tests.support.sections import claim, remote_store, restore
from tests.support.verified import verify

pytestmark = pytest.mark.usefixtures("quick_retries")


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


DAMAGES = {
    "a flipped bit": lambda there: flip_a_byte(there / "actor/optimizer/rank_00000.safetensors"),
    "a missing file": lambda there: (there / "driver_state.json").unlink(),
    "a torn file": lambda there: torn(there / "actor/model/rank_00000.safetensors"),
    "a torn manifest": lambda there: torn(there / MANIFEST),
    "no manifest": lambda there: (there / MANIFEST).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_start_skips_a_damaged_copy(tmp_path, folder_url, damage):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copy_all(config)
    damage(remote_dir(tmp_path, 4))
    other = on_empty_disk(config, tmp_path / "b")
    assert start_from_remote(other) == 2
    assert_same_files(step_dir(config.run_dir, 2), step_dir(other.run_dir, 2))
    assert [json.loads(line)["step"] for line in (other.run_dir / HISTORY).read_text().splitlines()] == [1, 2]
    assert [path.name for path in other.run_dir.iterdir() if path.name.startswith(".")] == []


def test_a_run_does_not_start_at_zero_when_all_copies_are_damaged(tmp_path, folder_url):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copy_all(config)
    for step in (2, 4):
        DAMAGES["a flipped bit"](remote_dir(tmp_path, step))
    with pytest.raises(UserError, match="will not start again at step 0 by itself"):
        start_from_remote(on_empty_disk(config, tmp_path / "b"))


def test_a_run_whose_own_checkpoints_are_all_damaged_is_told_of_the_copies(tmp_path, folder_url):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copy_all(config)
    for step in (2, 4):
        flip_a_byte(step_dir(config.run_dir, step) / DRIVER_STATE)
    with pytest.raises(UserError) as raised:
        make_checkpointer(config, PlainRole()).resume()
    says(raised.value, "trainer.overwrite=false", f"downloads the newest copy from checkpoint.remote={folder_url}")
    assert start_from_remote(config) == 4
    assert make_checkpointer(config, PlainRole()).resume() is True


def test_copies_of_another_format_are_neither_used_nor_removed(tmp_path, folder_url, caplog):
    """A new version loses no checkpoint that an older version committed."""
    config = make_run(tmp_path / "a", 2, remote=folder_url)
    copy_all(config)
    manifest = read_manifest(remote_dir(tmp_path, 2))
    (remote_dir(tmp_path, 2) / MANIFEST).unlink()
    write_manifest(remote_dir(tmp_path, 2), replace(manifest, format=1))
    with pytest.raises(UserError, match="Every checkpoint in"):
        start_from_remote(on_empty_disk(config, tmp_path / "b"))
    shutil.rmtree(step_dir(config.run_dir, 2))
    save(config, 4)
    assert copy_all(config) == []
    assert remote_store(config).steps() == [4, 2]
    assert "holds 1 checkpoints of other runs or versions" in caplog.text


def test_a_lost_run_file_there_does_not_hide_the_copies(tmp_path, folder_url):
    config = make_run(tmp_path / "a", 2, remote=folder_url)
    copy_all(config)
    (remote_dir(tmp_path, 2).parent / RUN_FILE).write_text("{")
    other = on_empty_disk(config, tmp_path / "b")
    assert start_from_remote(other) == 2
    assert json.loads((remote_dir(tmp_path, 2).parent / RUN_FILE).read_text()) == {"run_id": "run-a"}


def test_a_damaged_history_costs_the_history_only(tmp_path, folder_url, caplog):
    config = make_run(tmp_path / "a", 2, remote=folder_url)
    copy_all(config)
    flip_a_byte(remote_dir(tmp_path, 2) / "run" / HISTORY)
    other = on_empty_disk(config, tmp_path / "b")
    assert start_from_remote(other) == 2
    assert not (other.run_dir / HISTORY).exists()
    assert "metrics.jsonl of step 2 is damaged or missing" in caplog.text


def test_a_copy_whose_manifest_points_outside_is_ignored(tmp_path, folder_url):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copy_all(config)
    evil = read_manifest(remote_dir(tmp_path, 4))
    (remote_dir(tmp_path, 4) / MANIFEST).unlink()
    write_manifest(
        remote_dir(tmp_path, 4), replace(evil, files=evil.files | {"../../escaped": {"size": 1, "xxh3_128": "0"}})
    )
    assert start_from_remote(on_empty_disk(config, tmp_path / "b")) == 2
    with pytest.raises(DamagedCheckpoint):
        verify(remote_dir(tmp_path, 4))


def test_a_directory_with_checkpoints_is_left_alone(tmp_path, folder_url):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copy_all(config)
    shutil.rmtree(step_dir(config.run_dir, 4))
    assert start_from_remote(config) is None
    assert [path.name for path in scan(config.run_dir)] == ["global_step_2"]


def test_another_runs_folder_is_refused(tmp_path, folder_url):
    copy_all(make_run(tmp_path / "a", 2, 4, remote=folder_url))
    config = make_run(tmp_path / "b", 2, remote=folder_url, run_id="run-b")
    before = (remote_dir(tmp_path, 2) / MANIFEST).read_bytes()
    with pytest.raises(UserError, match=r"another run, up to step 4(.|\n)*experiment_name(.|\n)*overwrite=true"):
        start_from_remote(config)
    # If a start could not check the folder, the background copies of the run refuse the folder in the same way.
    assert copy_all(config) == [2]
    assert (remote_dir(tmp_path, 2) / MANIFEST).read_bytes() == before


@pytest.mark.parametrize("way", ["overwrite", "fork"])
def test_overwrite_or_fork_takes_over_another_runs_remote_folder(tmp_path, folder_url, way, caplog):
    first = make_run(tmp_path / "a", 2, 9, remote=folder_url)
    copy_all(first)
    config = on_empty_disk(first, tmp_path / "b")
    source = None
    if way == "overwrite":
        config.trainer.overwrite = True
        assert start_from_remote(config) is None
    else:
        source = tmp_path / "elsewhere" / "global_step_1"
        config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(source)
        store = remote_store(config)
        assert restore(store, config, source) is None
        identify(config, "run-new", resumed_from=str(source))
        claim(store, config, long_retries())
    config.checkpoint.remote_max_to_keep = 1
    save(config, 2, 4)
    assert copy_all(config) == []
    assert complete_steps(config) == [9, 4, 2]
    assert "holds 2 checkpoints of other runs or versions" in caplog.text

    # On an empty disk the new run's checkpoints count, although the old run got further.
    again = on_empty_disk(config, tmp_path / "c")
    again.trainer.resume_mode = config.trainer.resume_mode
    assert start_from_remote(again, source) == 4
    assert json.loads((again.run_dir / RUN_FILE).read_text())["run_id"] == "run-new"


@pytest.mark.parametrize("setting", ["disable", "overwrite"])
def test_a_run_that_starts_anew_downloads_nothing(tmp_path, folder_url, setting):
    config = make_run(tmp_path / "a", 2, remote=folder_url)
    copy_all(config)
    other = on_empty_disk(config, tmp_path / "b")
    if setting == "disable":
        other.trainer.resume_mode = "disable"
        with pytest.raises(UserError, match="holds checkpoints of another run"):
            start_from_remote(other)
    else:
        other.trainer.overwrite = True
        assert start_from_remote(other) is None
    assert scan(other.run_dir) == []
