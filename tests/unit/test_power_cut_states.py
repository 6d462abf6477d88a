"""The record of file operations, and the states that a power cut may leave of them."""

import os
import random
import shutil
from pathlib import Path

import pytest

from rlhf.storage.files import (
    append_durably,
    exchange,
    link,
    make_dir,
    remove_dir,
    replace_durably,
    truncate,
    write_file,
    write_range,
)
from tests.support.power_cut_states import BLOCK, Disk, Link, Shelf, Tree, states
from tests.support.recorded_files import Op, recording


def disk_after(*ops: Op) -> Disk:
    disk = Disk()
    for op in ops:
        disk.apply(op)
    return disk


def all_states(disk: Disk, wanted: int = 300) -> list[Tree]:
    return list(states(disk, wanted, random.Random(1)))


def work(root: Path) -> None:
    """Change files in every way that the package does."""
    write_file(root, "a/b", [b"x" * 10, bytes(9000)])
    replace_durably(root / "c", "old")
    replace_durably(root / "c", "new")
    append_durably(root / "d", [b"1\n"])
    append_durably(root / "d", [b"22\n"])
    truncate(root / "d", 2)
    write_range(root / "e", 20_000, 5_000, memoryview(b"range"))
    link(root / "a" / "b", root / "f")
    write_file(root, "g/h/i", [b"z"])
    remove_dir(root / "g")
    with (root / "text").open("w") as text:
        text.write("one line\n")
    (root / "a").rename(root / "moved")
    make_dir(root / "one")
    write_file(root, "two/file", [b"2"])
    assert exchange(root / "one", root / "two")


def test_replaying_a_record_gives_the_files_on_disk(tmp_path):
    with recording(tmp_path) as recorder:
        work(tmp_path)
    assert not recorder.missed
    tree = disk_after(*recorder.ops).tree(lambda change: False, lambda node: node.content)
    there = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*")}
    assert there.keys() == tree.keys()
    assert {name: path.read_bytes() for name, path in there.items() if path.is_file() and name != "moved/b"} == {
        name: content for name, content in tree.items() if isinstance(content, bytes)
    }
    assert tree["moved/b"] == Link("f")
    assert os.fsync.__module__ == "posix"  # nothing stays replaced


def test_file_operations_that_the_recorder_misses_are_noticed(tmp_path):
    with recording(tmp_path) as recorder:
        (tmp_path / "link").symlink_to("x")
        shutil.copyfile(__file__, tmp_path / "copy")
    assert recorder.missed == ["os.symlink link"]
    # The record misses a copy inside the kernel, but the final comparison of bytes reveals it.
    tree = disk_after(*recorder.ops).tree(lambda change: False, lambda node: node.content)
    assert tree["copy"] != (tmp_path / "copy").read_bytes()


def test_a_recorded_sync_has_its_call_sites(tmp_path):
    with recording(tmp_path) as recorder:
        replace_durably(tmp_path / "c", "new")
    syncs = [op for op in recorder.ops if op.kind.startswith("sync")]
    assert [op.kind for op in syncs] == ["sync", "sync_dir"]
    assert [len(op.sites) for op in syncs] == [1, 2]  # in the function, and in what it calls
    assert {site[0] for op in syncs for site in op.sites} == {"storage/files.py"}


NEW = (Op("create", "t"), Op("write", "t", data=b"new"))


@pytest.mark.parametrize(
    ("ops", "found"),
    [
        # Nothing is synced: no name, or one with any part of the bytes.
        (NEW, {None, b"", b"new", b"\0\0\0", b"n"}),
        # The bytes are synced, the name is not.
        ((*NEW, Op("sync", "t")), {None, b"new"}),
        # The name is synced, the bytes are not.
        ((*NEW, Op("sync_dir", "")), {b"", b"new", b"\0\0\0", b"n"}),
        ((*NEW, Op("sync", "t"), Op("sync_dir", "")), {b"new"}),
        ((*NEW, Op("sync", "t"), Op("sync_dir", ""), Op("unlink", "t")), {None, b"new"}),
    ],
)
def test_a_file_has_what_was_synced_and_any_part_of_the_rest(ops, found):
    assert {tree.get("t") for tree in all_states(disk_after(*ops))} == found


def test_a_rename_happens_in_one_piece_and_takes_its_target_with_it():
    old = (Op("create", "t"), Op("write", "t", data=b"old"), Op("sync", "t"), Op("sync_dir", ""))
    fresh = (Op("create", "n"), Op("write", "n", data=b"new"), Op("sync", "n"), Op("rename", "n", "t"))
    seen = {(tree.get("t"), tree.get("n")) for tree in all_states(disk_after(*old, *fresh))}
    assert seen == {(b"old", None), (b"old", b"new"), (b"new", None)}


def test_an_exchange_happens_in_one_piece():
    base = (Op("mkdir", "a"), Op("create", "a/1"), Op("sync_dir", "a"), Op("mkdir", "b"), Op("sync_dir", ""))
    seen = {frozenset(tree) for tree in all_states(disk_after(*base, Op("exchange", "a", "b")))}
    assert seen == {frozenset({"a", "b", "a/1"}), frozenset({"a", "b", "b/1"})}
    synced = all_states(disk_after(*base, Op("exchange", "a", "b"), Op("sync_dir", "")))
    assert {frozenset(tree) for tree in synced} == {frozenset({"a", "b", "b/1"})}


def test_a_rename_to_another_directory_happens_in_both():
    base = (Op("mkdir", "d"), Op("create", "d/t"), Op("sync_dir", "d"), Op("sync_dir", ""), Op("rename", "d/t", "t"))
    assert {frozenset(tree) for tree in all_states(disk_after(*base))} == {
        frozenset({"d", "d/t"}),
        frozenset({"d", "t"}),
    }
    for synced in ("", "d"):
        assert {frozenset(tree) for tree in all_states(disk_after(*base, Op("sync_dir", synced)))} == {
            frozenset({"d", "t"})
        }


def test_a_directory_without_a_durable_name_loses_its_files():
    ops = (Op("mkdir", "d"), Op("create", "d/t"), Op("sync", "d/t"), Op("sync_dir", "d"))
    assert {frozenset(tree) for tree in all_states(disk_after(*ops))} == {frozenset(), frozenset({"d", "d/t"})}


def test_changes_of_names_may_be_lost_in_any_order():
    ops = [Op("mkdir", name) for name in "abc"]
    assert len({frozenset(tree) for tree in all_states(disk_after(*ops))}) == 8


def test_blocks_are_lost_one_by_one():
    old, new = b"o" * 3 * BLOCK, b"n" * 3 * BLOCK
    base = (Op("create", "t"), Op("write", "t", data=old), Op("sync", "t"), Op("sync_dir", ""))
    many = [Op("mkdir", f"d{i}") for i in range(8)]  # too many states to build all
    seen = {tree["t"] for tree in all_states(disk_after(*base, Op("write", "t", data=new), *many), 2000)}
    blocks = {content[i * BLOCK : (i + 1) * BLOCK][:1] for content in seen for i in range(3)}  # type: ignore[index]
    assert blocks == {b"o", b"n"}  # no zeros where there always was something
    assert len(seen) == 8


def test_files_on_another_machine_survive_the_power_cut():
    disk = Disk(["far"])
    for op in (Op("mkdir", "far"), Op("create", "far/t"), Op("write", "far/t", data=b"x"), Op("mkdir", "near")):
        disk.apply(op)
    assert {frozenset(tree.items()) for tree in all_states(disk)} == {
        frozenset({("far", None), ("far/t", b"x")}),
        frozenset({("far", None), ("far/t", b"x"), ("near", None)}),
    }


def test_a_state_is_built_and_writes_into_it_are_noticed(tmp_path):
    shelf = Shelf(tmp_path / "shelf")
    shelf.build({"d": None, "d/t": b"1", "l": Link("d/t"), "p": b"2"}, tmp_path / "state", lambda path: path != "p")
    assert (tmp_path / "state" / "l").read_bytes() == b"1"
    (tmp_path / "state" / "p").write_bytes(b"3")
    assert not shelf.changed()
    (tmp_path / "state" / "l").write_bytes(b"3")
    assert len(shelf.changed()) == 1
