"""Disks of a few MiB, for tests of what happens when they are full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Make `folder`, a file system of its own of `mib` MiB; skips the test where that is not allowed."""
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mount.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
