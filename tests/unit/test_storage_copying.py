"""Copy of ranges of checked files: every byte at its place, every block read once, and damage on either side named."""

import os
import random
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from rlhf.checkpoint.commit.manifest import describe
from rlhf.storage.copying import CheckedCopy, RangeCopy
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_file
from rlhf.storage.hashing import BLOCK
from rlhf.storage.reading import CheckedFiles
from tests.support.checkpoints import flip_bit

SIZES = {"a": 2 * BLOCK + 12_345, "deep/b": BLOCK, "c": 70_001}
HEADERS = {"one": b"header of one", "two": b"", "more/three": b"3"}


@pytest.fixture
def source(tmp_path) -> CheckedFiles:
    written = [write_file(tmp_path / "in", name, [os.urandom(size)]) for name, size in SIZES.items()]
    return CheckedFiles(tmp_path / "in", describe(written))


def pieces(seed: int) -> list[RangeCopy]:
    """Return ranges of all files, some small, which are appended to random targets in random order, with gaps."""
    rng, found, ends = random.Random(seed), [], {name: len(header) for name, header in HEADERS.items()}
    cuts = [(name, *sorted(rng.sample(range(size), 200))) for name, size in SIZES.items()]
    ranges = [(name, a, b) for name, *points in cuts for a, b in pairwise(points)]
    for name, start, stop in rng.sample(ranges, len(ranges) * 9 // 10):
        target = rng.choice(list(HEADERS))
        found.append(RangeCopy(name, start, stop, target, ends[target]))
        ends[target] += stop - start
    return found


def characters_read() -> int:
    """Return the number of bytes that this process has read by system calls, from any file."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_every_byte_is_at_its_place(source, tmp_path):
    ranges, progress = pieces(1), []
    with closing(CheckedCopy(source, ranges, tmp_path / "out", HEADERS)) as copy:
        copy.write(progress.append)
        copy.finish()
    wanted = dict(HEADERS)
    for piece in ranges:  # in the order of each target
        wanted[piece.target] += (tmp_path / "in" / piece.source).read_bytes()[piece.start : piece.stop]
    assert {name: (tmp_path / "out" / name).read_bytes() for name in HEADERS} == wanted
    assert sum(progress) == sum(piece.stop - piece.start for piece in ranges)


def test_a_block_is_read_once_to_be_copied(source, tmp_path):
    with closing(CheckedCopy(source, pieces(2), tmp_path / "out", HEADERS)) as copy:
        before = characters_read()
        copy.write()
        assert characters_read() - before < sum(SIZES.values()) + 100_000


def test_damage_of_the_source_is_named(source, tmp_path):
    flip_bit(tmp_path / "in" / "deep/b", 1_000_000)
    with (
        closing(CheckedCopy(source, pieces(3), tmp_path / "out", HEADERS)) as copy,
        pytest.raises(DamagedCheckpoint, match=r"^deep/b: content differs from its hash"),
    ):
        copy.write()


@pytest.mark.parametrize(("name", "bit"), [("one", 3), ("one", 40_000), ("more/three", 8_000_000)])
def test_damage_of_the_copy_is_named(source, tmp_path, name, bit):
    with closing(CheckedCopy(source, pieces(4), tmp_path / "out", HEADERS)) as copy:
        copy.write()
        flip_bit(tmp_path / "out" / name, bit)
        with pytest.raises(DamagedCheckpoint, match=f"{name}.* was not written correctly, try again"):
            copy.finish()


def test_a_copy_that_was_cut_off_is_named(source, tmp_path):
    with closing(CheckedCopy(source, pieces(5), tmp_path / "out", HEADERS)) as copy:
        copy.write()
        os.truncate(tmp_path / "out" / "two", 100_000)
        with pytest.raises(DamagedCheckpoint, match=r"two.* was not written correctly, try again: two: ends at"):
            copy.finish()
