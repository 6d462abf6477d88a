import errno
import json
import os
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlhf.checkpoint.commit import manifest as manifest_module
from rlhf.checkpoint.commit.formats import FORMAT, OLDEST
from rlhf.checkpoint.commit.manifest import (
    Manifest,
    damage_in,
    describe,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_file
from rlhf.storage.reading import CheckedFiles
from tests.support.checkpoints import flip_bit, lose_on_disk
from tests.support.verified import verify


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A small checkpoint of three files, one of them empty, with a non-ASCII text in its manifest."""
    root = tmp_path / "global_step_3"
    files = [
        write_file(root, "driver_state.json", [b'{"step": 3}\n']),
        write_file(root, "actor/model/rank_00000.safetensors", [bytes(range(40))]),
        write_file(root, "empty", []),
    ]
    write_manifest(root, make_manifest(describe(files)))
    return root


def make_manifest(files: dict) -> Manifest:
    return Manifest(
        3,
        1,
        "fsdp2",
        ["model"],
        ["actor"],
        "c",
        {"model.path": "f"},
        "2026-01-01T00:00:00+00:00",
        {"rlhf": "0é"},
        [1],
        1,
        files,
    )


def test_round_trip(checkpoint):
    manifest = verify(checkpoint)
    assert manifest == make_manifest(manifest.files)
    assert manifest.total_bytes == 52
    assert list(manifest.files) == ["actor/model/rank_00000.safetensors", "driver_state.json", "empty"]


def test_every_single_bit_flip_of_the_manifest_is_detected(checkpoint):
    path = checkpoint / "manifest.json"
    raw = path.read_bytes()
    assert parse_manifest(raw, path) == read_manifest(checkpoint)
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
            parse_manifest(bytes(changed), path)
    # The same holds for flips on disk: of the first and the last bit, and of some between them.
    for bit in sorted({0, 8 * len(raw) - 1, *random.Random(1).sample(range(8 * len(raw)), 18)}):
        flip_bit(path, bit)
        for read in (read_manifest, verify):
            with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
                read(checkpoint)
        flip_bit(path, bit)
    verify(checkpoint)


def test_every_cut_of_the_manifest_and_every_appended_byte_is_detected(checkpoint):
    path = checkpoint / "manifest.json"
    raw = path.read_bytes()
    appended = [raw + b"\n", raw + b" ", b"\n" + raw]
    for content in [raw[:length] for length in range(len(raw))] + appended:
        with pytest.raises(DamagedCheckpoint):
            parse_manifest(content, path)
    for content in [raw[:0], raw[:1], raw[: len(raw) // 2], raw[:-1], *appended]:
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpoint):
            read_manifest(checkpoint)


@pytest.mark.parametrize(
    "content", [b"[]", b"1", b'"payload"', b"{}", b'{"payload": [1]}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_manifest_with_other_content_is_damage_and_not_a_crash(checkpoint, content):
    (checkpoint / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        read_manifest(checkpoint)


def test_a_checkpoint_without_a_manifest_was_never_committed(checkpoint, tmp_path):
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"no manifest\.json: it was never committed"):
        verify(checkpoint)
    (checkpoint / "manifest.json").mkdir()
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is not a regular file"):
        verify(checkpoint)
    with pytest.raises(DamagedCheckpoint, match="never committed"):
        verify(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "actor/../../outside", ".."])
def test_paths_that_point_outside_are_refused(checkpoint, name):
    (checkpoint.parent / "outside").write_bytes(b"x")
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, make_manifest({name: {"size": 1, "xxh3_128": "0"}}))
    with pytest.raises(DamagedCheckpoint, match="points outside the checkpoint"):
        read_manifest(checkpoint)


def test_a_link_to_an_equal_file_outside_is_refused(checkpoint):
    inside, outside = checkpoint / "actor/model/rank_00000.safetensors", checkpoint.parent / "moved"
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(DamagedCheckpoint, match="link that points outside"):
        verify(checkpoint)
    inside.unlink()
    (checkpoint / "actor/model").rmdir()
    (checkpoint.parent / "folder").mkdir()
    outside.rename(checkpoint.parent / "folder" / inside.name)
    (checkpoint / "actor/model").symlink_to(checkpoint.parent / "folder")
    with pytest.raises(DamagedCheckpoint, match="link that points outside"):
        verify(checkpoint)


@pytest.mark.parametrize("elsewhere", ["../moved", "moved.json"])
def test_a_manifest_that_is_a_link_is_refused(checkpoint, elsewhere):
    manifest = checkpoint / "manifest.json"
    manifest.rename(checkpoint / elsewhere)
    manifest.symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        verify(checkpoint)


def test_a_checkpoint_reached_through_a_link_is_intact(checkpoint):
    link = checkpoint.parent / "newest"
    link.symlink_to(checkpoint)
    assert verify(link) == verify(checkpoint)


def test_a_checkpoint_in_the_folder_of_another_step_is_damage(checkpoint):
    moved = checkpoint.rename(checkpoint.parent / "global_step_4")
    with pytest.raises(DamagedCheckpoint, match="is of step 3, but its folder's name has another step"):
        verify(moved)


@pytest.mark.parametrize("name", ["driver_state.json", "actor/model/rank_00000.safetensors", "empty"])
def test_missing_cut_extended_and_changed_files_are_named(checkpoint, name):
    path = checkpoint / name
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedCheckpoint, match=f"{name}: {len(whole) + 1} bytes instead of {len(whole)}"):
        verify(checkpoint)
    if whole:
        path.write_bytes(whole[:-1])
        with pytest.raises(DamagedCheckpoint, match=f"{name}: {len(whole) - 1} bytes instead of {len(whole)}"):
            verify(checkpoint)
        path.write_bytes(whole)
        flip_bit(path, 8 * len(whole) - 1)
        with pytest.raises(DamagedCheckpoint, match=f"{name}: content differs from its hash"):
            verify(checkpoint)
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name}: missing"):
        verify(checkpoint)
    path.mkdir()
    with pytest.raises(DamagedCheckpoint, match=f"{name}: missing"):
        verify(checkpoint)


@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN, errno.EBADMSG])
def test_an_unreadable_file_on_disk_is_damage(checkpoint, monkeypatch, code):
    lost = checkpoint / "actor/model/rank_00000.safetensors"
    lose_on_disk(monkeypatch, lost, code)
    with pytest.raises(DamagedCheckpoint, match=f"rank_00000.safetensors: cannot be read: {os.strerror(code)}"):
        verify(checkpoint)

    lose_on_disk(monkeypatch, checkpoint / "manifest.json", code)
    with pytest.raises(DamagedCheckpoint, match=f"manifest.json cannot be read: {os.strerror(code)}"):
        read_manifest(checkpoint)


def test_a_transient_read_error_is_not_damage(checkpoint, monkeypatch):
    lose_on_disk(monkeypatch, checkpoint / "driver_state.json", errno.ESTALE)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        verify(checkpoint)


def test_all_damaged_files_are_reported_together(checkpoint):
    (checkpoint / "empty").unlink()
    flip_bit(checkpoint / "driver_state.json", 0)
    with pytest.raises(DamagedCheckpoint) as caught:
        verify(checkpoint)
    assert str(caught.value) == (
        f"{checkpoint} is damaged: driver_state.json: content differs from its hash; empty: missing"
    )


def test_linked_folders_count_as_linked_not_as_written(checkpoint):
    files = {
        name: {"size": size, "xxh3_128": ""} for name, size in (("ref/model/a", 5), ("ref/model2/a", 7), ("b", 11))
    }
    manifest = replace(make_manifest(files), linked={"ref/model": "global_step_2"})
    assert (manifest.total_bytes, manifest.linked_bytes) == (18, 5)


def test_an_error_about_the_manifest_format_names_both_formats(checkpoint):
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, replace(make_manifest({}), format=1))
    with pytest.raises(DamagedCheckpoint, match=f"format 1, .* reads formats {OLDEST} to {FORMAT}"):
        read_manifest(checkpoint)


def test_an_unknown_field_and_a_missing_one_are_damage(checkpoint):
    payload = asdict(make_manifest({}))
    for changed in (payload | {"surprise": 1}, {k: v for k, v in payload.items() if k != "step"}):
        (checkpoint / "manifest.json").write_bytes(manifest_module._text(changed))
        with pytest.raises(DamagedCheckpoint):
            read_manifest(checkpoint)


@pytest.mark.parametrize("imported", [{"path": "x"}, {"layout": "x", "path": 1}, ["layout"]])
def test_an_invalid_imported_field_is_damage(checkpoint, imported):
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, replace(make_manifest({}), imported=imported))
    with pytest.raises(DamagedCheckpoint, match="its field imported"):
        read_manifest(checkpoint)


def test_verifying_some_files_ignores_damage_in_other_files(checkpoint):
    (checkpoint / "empty").unlink()
    files = CheckedFiles(checkpoint, read_manifest(checkpoint).files)
    assert damage_in(files, ["driver_state.json"]) == []
    assert damage_in(files, ["empty"]) == ["empty: missing"]


def test_the_document_is_plain_json(checkpoint):
    document = json.loads((checkpoint / "manifest.json").read_text())
    assert set(document) == {"payload", "checksum"}
    assert document["payload"]["files"]["driver_state.json"]["size"] == 12
