"""Hashes files like a manifest, for tests that compare or forge manifests."""

from pathlib import Path

from rlhf.storage.hashing import BlockHashes


def hash_file(path: Path) -> tuple[int, str]:
    """Return size and hashes of a file on disk, as in `WrittenFile`."""
    hashes = BlockHashes()
    hashes.update(memoryview(path.read_bytes()))
    return hashes.size, hashes.hexdigests()
