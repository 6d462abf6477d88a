"""Manifests of older formats: read with the fields of the present format, and never changed."""

from dataclasses import asdict
from pathlib import Path

import pytest

from rlhf.checkpoint.commit import formats, manifest
from rlhf.checkpoint.commit.formats import FORMAT, OLDEST
from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.storage.disk_errors import DamagedCheckpoint, OtherFormat
from tests.support.published import make_manifest


def leave(root: Path, **changes: object) -> bytes:
    """Write a manifest with `changes` at `root` (None omits a field), and return its bytes."""
    payload = {name: value for name, value in (asdict(make_manifest(3, {}, {})) | changes).items() if value is not None}
    root.mkdir(exist_ok=True)
    (root / "manifest.json").write_bytes(manifest._text(payload))
    return (root / "manifest.json").read_bytes()


def test_a_manifest_of_0_1_0_has_the_first_numerics_version(tmp_path):
    # Promise 19.
    left = leave(tmp_path, format=7, numerics=None)
    read = read_manifest(tmp_path)
    assert (read.format, read.numerics) == (7, 1)
    assert (tmp_path / "manifest.json").read_bytes() == left


def test_a_field_of_a_later_format_is_damage(tmp_path):
    leave(tmp_path, numerics=None)
    with pytest.raises(DamagedCheckpoint, match="numerics"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("number", [OLDEST - 1, FORMAT + 1, True, 7.0, "7", [7]])
def test_other_formats_are_not_read(tmp_path, number):
    leave(tmp_path, format=number)
    with pytest.raises(OtherFormat, match=f"reads formats {OLDEST} to {FORMAT}"):
        read_manifest(tmp_path)


def test_migrations_apply_one_after_the_other(tmp_path, monkeypatch):
    steps = {
        7: lambda payload: payload | {"numerics": 4},
        8: lambda payload: payload | {"numerics": payload["numerics"] + 1},
    }
    monkeypatch.setattr(formats, "MIGRATIONS", steps)
    monkeypatch.setattr(formats, "FORMAT", 9)
    leave(tmp_path, format=7, numerics=None)
    assert read_manifest(tmp_path).numerics == 5
    leave(tmp_path, format=9, numerics=4)
    assert read_manifest(tmp_path).numerics == 4


def test_each_format_has_one_migration():
    assert sorted(formats.MIGRATIONS) == list(range(OLDEST, FORMAT))
