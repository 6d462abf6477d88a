import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import append_durably, fsync_dir, fsync_file, replace_durably
from rlhf.storage.reading import UnverifiedFiles
from rlhf.storage.safetensors_header import LARGEST, read_safetensors_header


@pytest.mark.parametrize("write", [lambda path: append_durably(path, [b"x"]), lambda path: replace_durably(path, "x")])
def test_an_error_of_a_full_disk_names_the_file(tmp_path: Path, write: Callable[[Path], object]) -> None:
    for name in ("file", ".tmp-file"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device.*file'"):
        write(tmp_path / "file")


@pytest.mark.parametrize("sync", [fsync_dir, fsync_file])
def test_a_sync_that_fails_names_the_path(tmp_path: Path, monkeypatch, sync: Callable[[Path], None]) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path if sync is fsync_dir else tmp_path / "file"
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        sync(path)
    assert caught.value.filename == str(path)


def test_a_header_larger_than_the_library_allows_is_not_read(tmp_path: Path) -> None:
    size = LARGEST + 1
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(size.to_bytes(8, "little"))
        file.truncate(8 + size)
    files = UnverifiedFiles(tmp_path, ["a.safetensors"])
    with pytest.raises(DamagedCheckpoint, match=f"header claims {size} bytes"):
        read_safetensors_header(files, "a.safetensors")
