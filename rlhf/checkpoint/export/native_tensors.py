"""Reads tensors of a native checkpoint's component in ranges, verifies them, and reads small ones together."""

from itertools import takewhile

import torch
from torch import Tensor

from rlhf.models.hf.source import TensorInfo
from rlhf.storage.shards import DTYPES, Shard, TensorReader

READ_AHEAD, MOST_AHEAD = 16 << 20, 128 << 20
"""Lower and upper limit in bytes of `together`, which is one block for each rank that saved the
checkpoint. Each read verifies whole blocks of a file, so reading small tensors one by one would read each block
many times."""


class NativeTensors:
    """Reads tensors of one component by name. Reads ahead: small whole tensors up to `together` bytes in one read."""

    def __init__(self, reader: TensorReader, together: int) -> None:
        self._reader = reader
        self._together = min(max(READ_AHEAD, together), MOST_AHEAD)
        self.infos = {name: TensorInfo(shape, DTYPES[dtype]) for name, (dtype, shape) in reader.tensors.items()}
        self._order = list(self.infos)
        self._place = {name: number for number, name in enumerate(self._order)}
        self._ahead: dict[str, Tensor] = {}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._ahead:
            info = self.infos[name]
            if (stop - start) * info.dtype.itemsize >= self._together or (start, stop) != (0, info.numel):
                return self._fetch({name: (start, stop)})[name]
            self._ahead = self._fetch({following: (0, self.infos[following].numel) for following in self._batch(name)})
        return self._ahead.pop(name)[start:stop]

    def _batch(self, name: str) -> list[str]:
        size = 0

        def fits(following: str) -> bool:
            nonlocal size
            size += self.infos[following].nbytes
            return size <= self._together

        return [name, *list(takewhile(fits, self._order[self._place[name] :]))[1:]]

    def _fetch(self, wanted: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
        found = {n: torch.empty(stop - start, dtype=self.infos[n].dtype) for n, (start, stop) in wanted.items()}
        self._reader.read_into({n: Shard(self.infos[n].shape, (start,), found[n]) for n, (start, _) in wanted.items()})
        return found
