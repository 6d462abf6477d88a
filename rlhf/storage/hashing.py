"""Hashes a file's blocks: xxh3-128 of each 4 MiB, so that a part of a file is verified without reading the rest."""

import xxhash

BLOCK = 4 << 20
"""Bytes per hash."""
HASH_DIGITS = 32
"""Hexadecimal digits per hash."""


class BlockHashes:
    def __init__(self) -> None:
        self.size = 0
        self._done: list[str] = []
        self._digest = xxhash.xxh3_128()

    def update(self, view: memoryview) -> None:
        while view:
            part = view[: BLOCK - self.size % BLOCK]
            self._digest.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if self.size % BLOCK == 0:
                self._done.append(self._digest.hexdigest())
                self._digest.reset()

    def hexdigests(self) -> str:
        """Return one hash per started block, concatenated; empty for no bytes."""
        return "".join(self._done) + (self._digest.hexdigest() if self.size % BLOCK else "")
