"""Verified reading: the right bytes in the right places, only the needed blocks, and no damage goes unnoticed."""

import os
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_file
from rlhf.storage.hashing import BLOCK
from rlhf.storage.reading import PART, THREADS, CheckedFiles
from rlhf.storage.shards import LANDING_BYTES, read_via_buffer
from tests.support.checkpoints import equal_bits, flip_bit
from tests.support.hashes import hash_file

SIZE = 2 * BLOCK + 12345
CONTENT = random.Random(7).randbytes(SIZE)
EDGES = sorted(
    {edge + d for edge in (0, PART, BLOCK, 2 * BLOCK, SIZE) for d in (-9, -1, 0, 1, 9) if 0 <= edge + d <= SIZE}
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("reading")
    (root / "f").write_bytes(CONTENT)
    return root


def checked(root: Path, *names: str) -> CheckedFiles:
    found = {name: hash_file(root / name) for name in names or ["f"]}
    return CheckedFiles(root, {name: {"size": size, "xxh3_128": hashes} for name, (size, hashes) in found.items()})


def blocks_of(ranges: list[tuple[int, int]]) -> set[int]:
    return {block for start, stop in ranges for block in range(start // BLOCK, -(-stop // BLOCK)) if start < stop}


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.sampled_from(EDGES) | st.integers(0, SIZE), max_size=12), wanted=st.randoms())
def test_any_ranges_are_filled_with_their_bytes_and_only_their_blocks_are_read(root, cuts, wanted):
    edges = sorted({0, SIZE, *cuts})
    ranges = [(a, b) for a, b in pairwise(edges) if wanted.random() < 0.5]
    wanted.shuffle(ranges)
    files, views = checked(root), [bytearray(b - a) for a, b in ranges]
    files.read("f", [(start, memoryview(view)) for (start, _), view in zip(ranges, views, strict=True)])
    for (start, stop), view in zip(ranges, views, strict=True):
        assert view == CONTENT[start:stop]
    assert files.checked.get("f", set()) == blocks_of(ranges)
    assert files.bytes_read == sum(len(CONTENT[b * BLOCK : (b + 1) * BLOCK]) for b in blocks_of(ranges))


def test_many_small_ranges_in_one_block(root):
    """There are more ranges than one system call accepts."""
    files, ranges = checked(root), [(start, bytearray(3)) for start in range(100, 100 + 5000 * 5, 5)]
    files.read("f", [(start, memoryview(view)) for start, view in ranges])
    assert all(view == CONTENT[start : start + 3] for start, view in ranges)


def test_short_reads_are_continued(root, monkeypatch):
    """Network file systems and signals cause short reads."""
    preadv, rng = os.preadv, random.Random(1)

    def short(descriptor: int, views: list, position: int) -> int:
        return preadv(descriptor, [views[0][: rng.randint(1, len(views[0]))]], position)

    monkeypatch.setattr(os, "preadv", short)
    assert checked(root).content("f") == CONTENT


def test_hashes_are_those_of_the_blocks(root, tmp_path):
    shards = [CONTENT[:5], CONTENT[5 : BLOCK + 1], b"", CONTENT[BLOCK + 1 :]]
    written = write_file(tmp_path, "f", shards)
    expected = [xxhash.xxh3_128(CONTENT[b : b + BLOCK]).hexdigest() for b in range(0, SIZE, BLOCK)]
    assert (written.size, written.xxh3_128) == (SIZE, "".join(expected)) == hash_file(root / "f")
    assert write_file(tmp_path, "full", [CONTENT[:BLOCK]]).xxh3_128 == expected[0]
    assert write_file(tmp_path, "empty", []).xxh3_128 == ""


def test_a_flipped_bit_is_found_only_by_reads_of_its_block(root, tmp_path):
    (tmp_path / "f").write_bytes(CONTENT)
    files, into = checked(tmp_path), memoryview(bytearray(10))
    rng = random.Random(3)
    for block in range(3):
        size = min(BLOCK, SIZE - block * BLOCK)
        for bit in (0, 8 * size - 1, rng.randrange(8 * size)):
            flip_bit(tmp_path / "f", 8 * BLOCK * block + bit)
            for other in range(3):
                if other != block:
                    files.read("f", [(other * BLOCK + 100, into)])
                    continue
                with pytest.raises(DamagedCheckpoint, match="f: content differs from its hash"):
                    files.read("f", [(other * BLOCK + 100, into)])
                with pytest.raises(DamagedCheckpoint, match="f: content differs from its hash"):
                    files.verify_blocks("f", files.blocks("f"))
            flip_bit(tmp_path / "f", 8 * BLOCK * block + bit)
    files.verify_blocks("f", files.blocks("f"))


def test_what_is_cut_missing_or_unknown_is_damage(root, tmp_path):
    (tmp_path / "f").write_bytes(CONTENT)
    files = checked(tmp_path)
    os.truncate(tmp_path / "f", SIZE - 1)
    with pytest.raises(DamagedCheckpoint, match=f"f: ends at byte {SIZE - 1}"):
        files.content("f")
    (tmp_path / "f").unlink()
    with pytest.raises(DamagedCheckpoint, match="f: missing"):
        files.content("f")
    with pytest.raises(DamagedCheckpoint, match="g: not in the manifest"):
        files.content("g")
    with pytest.raises(DamagedCheckpoint, match="f: ends before byte"):
        files.read("f", [(SIZE - 1, memoryview(bytearray(2)))])
    # With fewer hashes than blocks, no block is accepted without verification.
    for hashes in ("", checked(root)._files["f"]["xxh3_128"][:-1]):
        with pytest.raises(DamagedCheckpoint, match="differs from its hash"):
            CheckedFiles(root, {"f": {"size": SIZE, "xxh3_128": hashes}}).content("f")


def test_reading_needs_only_a_fixed_buffer_beside_the_destination(tmp_path):
    write_file(tmp_path, "f", [CONTENT] * 5)
    files, into = checked(tmp_path), bytearray(5 * SIZE)
    tracemalloc.start()
    try:
        files.read("f", [(0, memoryview(into)[: 2 * SIZE]), (3 * SIZE, memoryview(into)[3 * SIZE :])])
        files.verify_blocks("f", files.blocks("f"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * THREADS * PART


def test_other_devices_are_filled_window_by_window(root):
    """Read with windows of one and of two blocks, into main memory, which the function treats like another device."""
    files = checked(root)
    bounds = [(0, 9), (9, BLOCK + 5), (BLOCK + 8, 2 * BLOCK), (2 * BLOCK, SIZE)]
    for landing_blocks in (1, 2):
        parts = [(start, torch.zeros(stop - start, dtype=torch.uint8)) for start, stop in bounds]
        read_via_buffer(torch.empty(landing_blocks * BLOCK, dtype=torch.uint8), files, "f", parts)
        for start, part in parts:
            assert equal_bits(part, torch.frombuffer(bytearray(CONTENT[start : start + len(part)]), dtype=torch.uint8))
    assert files.bytes_read == 2 * SIZE
    assert LANDING_BYTES % BLOCK == 0
