"""Output folder of a verb: whole or not there, whatever happens to its writer."""

import os
from pathlib import Path

import pytest

from rlhf.checkpoint.interop.target import output_folder, prove
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_file, write_small
from tests.support.checkpoints import flip_bit
from tests.support.published import publish


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_there_only_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "out"
    with output_folder(target) as folder:
        write_small(folder / "a", b"1")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "a").read_bytes() == b"1"
    assert names(target.parent) == ["out"]


def test_nothing_stays_of_one_that_failed(tmp_path):
    with pytest.raises(ZeroDivisionError), output_folder(tmp_path / "out") as folder:
        write_file(folder, "a", (b"1" * (1 // number) for number in (1, 0)))
    assert names(tmp_path) == []


def test_leftovers_of_the_dead_go_and_only_those_of_this_target(tmp_path):
    for name in (".incomplete-out-0123456789ab", ".replaced-out-0123456789ab", ".incomplete-other-0123456789ab"):
        (tmp_path / name).mkdir()
    with output_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == [".incomplete-other-0123456789ab", "out"]


def test_another_writer_is_not_disturbed(tmp_path):
    with output_folder(tmp_path / "out") as folder:
        with pytest.raises(UserError, match="being written by another process"), output_folder(tmp_path / "out"):
            pass
        write_small(folder / "a", b"1")
    assert names(tmp_path / "out") == ["a"]


def test_a_target_that_is_there(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with output_folder(target) as folder:  # one that somebody made for it
        write_small(folder / "a", b"1")
    with pytest.raises(UserError, match=f"{target} is there already.*--overwrite"), output_folder(target):
        pass
    with output_folder(target, overwrite=True) as folder:
        write_small(folder / "b", b"2")
        assert names(target) == ["a"]
    assert names(target) == ["b"]
    assert names(tmp_path) == ["out"]


def test_targets_that_would_cost_something(tmp_path, monkeypatch):
    source = tmp_path / "runs" / "source"
    source.mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "dangling").symlink_to("nowhere")
    checkpoint = publish(tmp_path / "runs", 3)
    monkeypatch.chdir(source)
    wrong = {
        source: "holds what is read",
        tmp_path / "runs": "holds what is read",
        checkpoint / "merged": "lies in the checkpoint",
        tmp_path / "file": "is no folder",
        tmp_path / "link": "holds what is read",
        tmp_path / "dangling": "is no folder",
    }
    for target, message in wrong.items():
        with pytest.raises(UserError, match=message), output_folder(target, overwrite=True, sources=[source]):
            pass
    with pytest.raises(UserError, match="may be replaced"), output_folder(tmp_path, overwrite=True):
        pass
    assert names(tmp_path) == ["dangling", "file", "link", "runs"]


def test_what_is_not_as_it_was_written_is_named(tmp_path):
    written = [write_file(tmp_path, name, [os.urandom(1000)]) for name in ("a", "deep/b")]
    prove(tmp_path, written)
    flip_bit(tmp_path / "deep" / "b", 77)
    with pytest.raises(DamagedCheckpoint, match=r"deep/b was not written.*differs from its hash"):
        prove(tmp_path, written)
