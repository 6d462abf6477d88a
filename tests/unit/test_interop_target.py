"""Output folder of a verb: complete or absent, even if its writer fails or is killed."""

import errno
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf import events
from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.commit import output_folder as target_module
from rlhf.checkpoint.commit.output_folder import output_folder, verify_written
from rlhf.errors import UserError
from rlhf.storage import files
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_file, write_small
from tests.support.checkpoints import flip_bit
from tests.support.hostile import manifest
from tests.support.published import publish
from tests.support.refusals import says
from tests.support.small_disks import small_disk
from tests.support.tiny_models import causal_lm


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_target_appears_only_when_complete(tmp_path):
    target = tmp_path / "deep" / "out"
    with output_folder(target) as folder:
        write_small(folder / "a", b"1")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "a").read_bytes() == b"1"
    assert names(target.parent) == ["out"]


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), output_folder(tmp_path / "out") as folder:
        write_file(folder, "a", (b"1" * (1 // number) for number in (1, 0)))
    assert names(tmp_path) == []


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_failed_sync_of_the_new_name_keeps_the_old_output(tmp_path, monkeypatch, exchanges):
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").write_bytes(b"old")
    if not exchanges:
        monkeypatch.setattr(target_module, "exchange", lambda *_: False)

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(target_module, "fsync_dir", fail)
    with pytest.raises(OSError, match="Input/output"), output_folder(target, overwrite=True) as folder:
        write_small(folder / "a", b"new")
    assert names(tmp_path) == ["out"]
    assert (target / "a").read_bytes() == b"old"


@pytest.mark.parametrize("name", [r"out\.earlier-\w+", r"\.(incomplete|replaced)-out-\w+"])
@pytest.mark.parametrize("exchanges", [True, False])
def test_an_old_output_that_cannot_be_put_back_stays(tmp_path, monkeypatch, exchanges, name):
    """The sync of the new name fails, and then the first rename. With the second `name`, later renames fail, too."""
    target, calls, ends_well = tmp_path / "out", [], name.startswith("out")
    target.mkdir()
    (target / "a").write_bytes(b"old")

    def fail(path: Path) -> None:
        for name in ("exchange", "rename"):
            monkeypatch.setattr(target_module, name, partial(renaming, getattr(files, name)))
        raise OSError(errno.EIO, "Input/output error", str(path))

    def renaming(real: Any, path: Path, other: Path) -> Any:
        calls.append(path)
        if len(calls) > 1 and ends_well:
            return real(path, other)
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    if not exchanges:
        monkeypatch.setattr(target_module, "exchange", lambda *_: False)
    monkeypatch.setattr(target_module, "fsync_dir", fail)
    with pytest.raises(OSError, match="Input/output") as caught, output_folder(target, overwrite=True) as folder:
        write_small(folder / "a", b"new")
    (earlier,) = [path for path in tmp_path.iterdir() if re.fullmatch(name, path.name)]
    assert (earlier / "a").read_bytes() == b"old"
    assert (target / "a").read_bytes() == b"new"
    assert caught.value.filename == str(target)
    assert str(earlier) in str(caught.value)


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_old_output_that_cannot_be_removed_is_no_error(tmp_path, monkeypatch, caplog, exchanges):
    (tmp_path / "out").mkdir()
    write_small(tmp_path / "out" / "a", b"old")
    if not exchanges:
        monkeypatch.setattr(target_module, "exchange", lambda *_: False)

    def busy(path: Path, **_: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr("shutil.rmtree", busy)
    with output_folder(tmp_path / "out", overwrite=True) as folder:
        write_small(folder / "a", b"new")
    assert (tmp_path / "out" / "a").read_bytes() == b"new"
    says(caplog.text, "could not be removed")
    monkeypatch.undo()
    assert target_module.remove_leftovers(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_a_writer_that_has_moved_the_old_output_is_not_disturbed(tmp_path, monkeypatch):
    """On a file system that cannot exchange names, the old output has another name for an instant."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(target_module, "exchange", lambda *_: False)
    listed, seen = Path.iterdir, []

    def replaced_first(folder: Path) -> list[Path]:  # file systems list names in any order
        return sorted(listed(folder), reverse=True)

    def another_starts(event: str) -> None:
        if event == "target.replaced":
            seen.append(target_module.remove_leftovers(tmp_path / "out"))

    monkeypatch.setattr(Path, "iterdir", replaced_first)
    monkeypatch.setattr(target_module, "announce", another_starts)
    with output_folder(tmp_path / "out", overwrite=True) as folder:
        write_small(folder / "a", b"new")
    assert seen == [False]
    assert (tmp_path / "out" / "a").read_bytes() == b"new"


def test_an_interrupt_between_the_exchange_and_its_note_deletes_nothing(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").write_bytes(b"old")

    def exchanged(*paths: Path) -> bool:
        files.exchange(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(target_module, "exchange", exchanged)
    with pytest.raises(KeyboardInterrupt), output_folder(target, overwrite=True) as folder:
        write_small(folder / "a", b"new")
    assert sorted(path.read_bytes() for path in tmp_path.glob("*/a")) == [b"new", b"old"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_output_that_a_kill_left_without_a_name_gets_it_back(tmp_path, overwrite):
    """A file system cannot exchange names, and a kill came between the two renames."""
    left = tmp_path / ".replaced-out-0123456789ab"
    left.mkdir()
    (left / "a").write_bytes(b"old")
    refused = pytest.raises(ZeroDivisionError if overwrite else UserError)
    with refused, output_folder(tmp_path / "out", overwrite=overwrite):
        raise ZeroDivisionError
    assert (tmp_path / "out" / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["out"]


def test_leftovers_of_dead_writers_of_this_target_are_removed(tmp_path):
    for name in (".incomplete-out-0123456789ab", ".replaced-out-0123456789ab", ".incomplete-other-0123456789ab"):
        (tmp_path / name).mkdir()
    with output_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == [".incomplete-other-0123456789ab", "out"]


def test_a_second_writer_of_the_same_target_is_rejected(tmp_path):
    with output_folder(tmp_path / "out") as folder:
        with pytest.raises(UserError, match="being written by another process"), output_folder(tmp_path / "out"):
            pass
        write_small(folder / "a", b"1")
    assert names(tmp_path / "out") == ["a"]


def test_an_existing_target_needs_overwrite(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with output_folder(target) as folder:  # an empty folder may exist
        write_small(folder / "a", b"1")
    with pytest.raises(UserError, match=f"{target} exists already.*--overwrite"), output_folder(target):
        pass
    with output_folder(target, overwrite=True) as folder:
        write_small(folder / "b", b"2")
        assert names(target) == ["a"]
    assert names(target) == ["b"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("can", [True, False])
def test_a_replaced_target_never_disappears_if_names_can_be_exchanged(tmp_path, monkeypatch, can):
    if not can:
        monkeypatch.setattr(files, "_swap", lambda path, other: errno.EINVAL)
    seen = []
    monkeypatch.setattr(target_module, "announce", lambda event: seen.append((event, names(tmp_path))))
    for content in (b"1", b"2"):
        with output_folder(tmp_path / "out", overwrite=True) as folder:
            write_small(folder / "a", content)
    there = [("out" in found) for event, found in seen if event == "target.replaced"]
    assert there == [can]
    assert (tmp_path / "out" / "a").read_bytes() == b"2"
    assert names(tmp_path) == ["out"]


def test_targets_that_would_overwrite_sources_or_checkpoints_are_rejected(tmp_path, monkeypatch):
    source = tmp_path / "runs" / "source"
    source.mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "dangling").symlink_to("nowhere")
    checkpoint = publish(tmp_path / "runs", 3)
    monkeypatch.chdir(source)
    wrong = {
        source: "contains the source",
        tmp_path / "runs": "contains the source",
        checkpoint / "merged": "is in the checkpoint",
        tmp_path / "file": "is not a folder",
        tmp_path / "link": "contains the source",
        tmp_path / "dangling": "is not a folder",
        tmp_path / "file" / "deep" / "out": f"{tmp_path}/file is not a folder",
        tmp_path / "dangling" / "out": "dangling is not a folder",
    }
    for target, message in wrong.items():
        with pytest.raises(UserError, match=message), output_folder(target, overwrite=True, sources=[source]):
            pass
    with pytest.raises(UserError, match="must not be replaced"), output_folder(tmp_path, overwrite=True):
        pass
    assert names(tmp_path) == ["dangling", "file", "link", "runs"]


def test_verify_written_names_a_changed_file(tmp_path):
    written = [write_file(tmp_path, name, [os.urandom(1000)]) for name in ("a", "deep/b")]
    verify_written(tmp_path, written)
    flip_bit(tmp_path / "deep" / "b", 77)
    with pytest.raises(DamagedCheckpoint, match=r"deep/b was not written.*differs from its hash"):
        verify_written(tmp_path, written)


def test_a_runs_checkpoints_are_not_replaced(tmp_path):
    run_dir = tmp_path / "project" / "run"
    checkpoint = publish(run_dir, 3)
    before = names(checkpoint)
    message = f"{checkpoint} is a checkpoint of a run, which --overwrite does not replace"
    for target in (checkpoint, run_dir, tmp_path / "project"):
        with pytest.raises(UserError, match=message), output_folder(target, overwrite=True):
            pass
    assert names(checkpoint) == before
    manifest(lambda payload: payload | {"imported": {"layout": "fsdp", "path": "/x"}})(checkpoint)
    with output_folder(checkpoint, overwrite=True):  # an import may be made again
        pass
    assert names(checkpoint) == []


def test_a_leftover_link_is_removed_without_its_target(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / ".incomplete-out-0123456789ab").symlink_to(tmp_path / "mine")
    with output_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == ["mine", "out"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    causal_lm("llama", folder)
    return folder


COMMANDS = {
    "import": lambda model, folder: ["import", model, folder / "global_step_0"],
    "dcp": lambda model, folder: ["convert", model, folder / "out", "--to", "dcp"],
    "megatron": lambda model, folder: ["convert", model, folder / "out", "--to", "megatron"],
    "mp_rank": lambda model, folder: [
        "convert", model, folder / "out", "--to", "megatron", "--megatron-layout", "mp_rank"
    ],
    "merge": lambda model, folder: ["merge", "--local_dir", model, "--target_dir", folder / "out"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_one_line_and_nothing_else(command, model, tmp_path, capsys):
    with small_disk(tmp_path / "small", 1) as folder:
        (folder / "mine").write_bytes(bytes((1 << 20) - (60 << 10)))
        arguments = [str(word) for word in command(model, folder)]
        assert main(arguments) == 1
        output = capsys.readouterr().err
        assert ": No space left on device. Free disk space there, or give a path on another disk." in output
        assert (output.count("\n"), ".incomplete" in output) == (1, False)
        assert names(folder) == ["mine"]


def test_a_target_without_write_permission_is_an_error(tmp_path, monkeypatch):
    def fail(*_):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / ".incomplete-out-1"))

    monkeypatch.setattr(target_module, "make_new_dir", fail)
    with pytest.raises(PermissionError) as caught, output_folder(tmp_path / "out"):
        pass
    assert caught.value.filename == str(tmp_path / "out")


def test_ctrl_c_is_one_line_and_leaves_nothing(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(events, "_listeners", [])

    def interrupt(event: str) -> None:
        if event == "target.synced":
            raise KeyboardInterrupt

    events.subscribe(interrupt)
    assert main(["import", str(model), str(tmp_path / "global_step_0")]) == 130
    assert capsys.readouterr().err == "Stopped. Nothing is left half done; run the same command again to finish.\n"
    assert names(tmp_path) == []
