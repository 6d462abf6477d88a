from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.storage.files import append_durably, replace_durably


@pytest.mark.parametrize("write", [lambda path: append_durably(path, [b"x"]), lambda path: replace_durably(path, "x")])
def test_an_error_of_a_full_disk_names_the_file(tmp_path: Path, write: Callable[[Path], object]) -> None:
    for name in ("file", ".tmp-file"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device.*file'"):
        write(tmp_path / "file")
