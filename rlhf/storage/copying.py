"""Copies ranges of verified files into new files; reads each block once and verifies its copy. Imports no torch."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import SharedFile
from rlhf.storage.hashing import BLOCK
from rlhf.storage.reading import PART, THREADS, CheckedFiles

AT_A_TIME = 256
"""Number of blocks queued for the threads: together 1 GiB."""
Block = tuple[str, int]
"""A source file, and the index of a block in this file."""


class RangeCopy(NamedTuple):
    """Bytes [start, stop) of a source file, and their target file and position."""

    source: str
    start: int
    stop: int
    target: str
    position: int


class CheckedCopy:
    """Writes one file below `root` per entry of `headers` (path -> first bytes), and copies non-overlapping `ranges` of
    `files` into the new files. Reads each block of `files` once, with 256 KiB in memory per thread."""

    def __init__(
        self, files: CheckedFiles, ranges: Iterable[RangeCopy], root: Path, headers: Mapping[str, bytes]
    ) -> None:
        self._files, self._root, self._headers = files, root, headers
        self._targets = {path: SharedFile(root, path) for path in headers}
        self._ranges: dict[Block, list[RangeCopy]] = defaultdict(list)
        for piece in ranges:
            for number in range(piece.start // BLOCK, -(-piece.stop // BLOCK)):
                self._ranges[piece.source, number].append(_cut(piece, number * BLOCK, (number + 1) * BLOCK))
        for parts in self._ranges.values():
            parts.sort(key=lambda part: part.start)
        # As far as the order of the sources allows, write each target from start to end.
        order = {path: number for number, path in enumerate(headers)}
        self._blocks = sorted(
            self._ranges, key=lambda block: min((order[part.target], part.position) for part in self._ranges[block])
        )

    def write(self, progress: Callable[[int], None] = lambda count: None) -> None:
        """Write the files and call `progress` with the bytes written. Raises DamagedCheckpoint, with the file's name,
        for a damaged block of the source."""
        for path, header in self._headers.items():
            self._targets[path].write_at(0, memoryview(header))
        for count in self._for_each_block(self._copy):
            progress(count)

    def finish(self) -> None:
        """Sync the files and read them back; raises DamagedCheckpoint, with the file's name, for a wrong copy."""
        with ThreadPoolExecutor(1) as beside:
            # Sync in another thread, so that the disk works while the processor hashes.
            synced = beside.submit(self._sync)
            self._verify_headers()
            for _ in self._for_each_block(self._verify_block):
                pass
            synced.result()

    def _sync(self) -> None:
        for target in self._targets.values():
            target.sync()

    def close(self) -> None:
        for target in self._targets.values():
            target.close()

    def _for_each_block(self, work: Callable[[Block], int]) -> Iterator[int]:
        """Yield the results of `work` on each block, AT_A_TIME blocks at a time."""
        todo = iter(self._blocks)
        with ThreadPoolExecutor(THREADS) as threads:
            while some := list(islice(todo, AT_A_TIME)):
                yield from threads.map(work, some)

    def _copy(self, block: Block) -> int:
        count = 0
        for start, view in self._files.parts(*block):
            for part in _within(self._ranges[block], start, start + len(view)):
                self._targets[part.target].write_at(part.position, view[part.start - start : part.stop - start])
                count += part.stop - part.start
        return count

    def _verify_headers(self) -> None:
        for path, header in self._headers.items():
            found = bytearray(len(header))
            with self._name_targets_in_errors([path]):
                self._targets[path].read_at(0, memoryview(found))
                if found != header:
                    raise DamagedCheckpoint(f"{path}: the header differs")

    def _verify_block(self, block: Block) -> int:
        """Read a block of the source back from the targets and compare it with its hash."""
        with self._name_targets_in_errors(dict.fromkeys(part.target for part in self._ranges[block])):
            self._files.compare_block(*block, self._read_back(block))
        return 0

    @contextmanager
    def _name_targets_in_errors(self, targets: Iterable[str]) -> Iterator[None]:
        """Add the names of the target files to a DamagedCheckpoint."""
        try:
            yield
        except DamagedCheckpoint as error:
            names = " or ".join(str(self._root / target) for target in targets)
            raise DamagedCheckpoint(f"{names} was not written correctly, try again: {error}") from None

    def _read_back(self, block: Block) -> Iterator[memoryview]:
        """Yield a block's bytes, read from the targets. Bytes that no target contains are read from the source."""
        name, number = block
        end, memory = min((number + 1) * BLOCK, self._files.size(name)), memoryview(bytearray(PART))
        for start in range(number * BLOCK, end, PART):
            view, stop = memory[: end - start], min(start + PART, end)
            done = start
            for part in [*_within(self._ranges[block], start, stop), RangeCopy("", stop, stop, "", 0)]:
                if done < part.start:
                    self._files.read(name, [(done, view[done - start : part.start - start])])
                if part.start < part.stop:
                    self._targets[part.target].read_at(part.position, view[part.start - start : part.stop - start])
                done = part.stop
            yield view


def _within(parts: list[RangeCopy], start: int, stop: int) -> Iterator[RangeCopy]:
    """Yield the parts of sorted ranges in the bytes [start, stop)."""
    first = bisect_right(parts, start, key=lambda part: part.stop)
    for part in takewhile(lambda part: part.start < stop, islice(parts, first, None)):
        yield _cut(part, start, stop)


def _cut(part: RangeCopy, start: int, stop: int) -> RangeCopy:
    low, high = max(part.start, start), min(part.stop, stop)
    return RangeCopy(part.source, low, high, part.target, part.position + low - part.start)
