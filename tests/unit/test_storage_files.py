import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import append_durably, fsync_dir, fsync_file, remove_dir, replace_durably
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


def nested(folder: Path, depth: int) -> Path:
    """Create `depth` folders inside each other below `folder`, and a file in each."""
    deepest = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=deepest)
        deeper = os.open("d", os.O_RDONLY, dir_fd=deepest)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=deeper))
        os.close(deepest)
        deepest = deeper
    os.close(deepest)
    return folder


@pytest.mark.parametrize("ignore_errors", [True, False])
@pytest.mark.parametrize(
    "depth", [1500, 5000]
)  # deeper than the stack; more open files, and a longer path, than allowed
def test_a_tree_of_any_depth_is_removed(tmp_path: Path, depth: int, ignore_errors: bool) -> None:
    (tmp_path / "kept").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    remove_dir(nested(folder, depth), ignore_errors=ignore_errors)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o555])
@pytest.mark.parametrize("ignore_errors", [True, False])
def test_only_a_removal_that_ignores_errors_changes_permissions(tmp_path: Path, mode: int, ignore_errors: bool) -> None:
    """A response may leave folders that nobody can enter; a user may have protected a checkpoint in this way."""
    source = f"""
import os
from pathlib import Path
from rlhf.storage.files import remove_dir
if os.getuid() == 0:
    os.setuid(65534)  # root can enter every folder
folder = Path("folder")
(folder / "a" / "b" / "c").mkdir(parents=True)
(folder / "a" / "file").touch()
for path in (folder / "a" / "b" / "c", folder / "a" / "b", folder / "a", folder):
    path.chmod({mode})
try:
    remove_dir(folder, ignore_errors={ignore_errors})
except PermissionError:
    assert not {ignore_errors}
assert folder.exists() != {ignore_errors}
"""
    tmp_path.chmod(0o777)
    subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True)
    remove_dir(tmp_path, ignore_errors=True)


def test_a_removal_that_ignores_errors_removes_the_rest(tmp_path: Path, monkeypatch) -> None:
    folder = nested(tmp_path, 3)
    (folder / "stuck").touch()
    unlink = os.unlink

    def busy(path, **settings: object) -> None:
        if Path(path).name == "stuck":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, **settings)

    monkeypatch.setattr(os, "unlink", busy)
    remove_dir(folder, ignore_errors=True)
    assert [path.name for path in folder.iterdir()] == ["stuck"]
    remove_dir(tmp_path / "missing", ignore_errors=True)
    with pytest.raises(OSError, match="busy"):
        remove_dir(folder)
