"""Copies the state of a save to separate memory, so that training continues while the copy is written."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from rlhf.checkpoint.save.snapshot import Snapshot
from rlhf.errors import UserError
from rlhf.storage.page_locked import PageLockedMemory

ALIGNMENT = 64


class Stager:
    """Copies the live tensors of a snapshot into memory that is reused from save to save.

    Allocating memory takes several times as long as the copy, so a save allocates only if it needs more than any
    earlier save. CUDA tensors are copied to page-locked memory on a separate stream. `remedy` is the setting to
    suggest if memory is short: with it, saves need no copies.
    """

    def __init__(self, remedy: str = "checkpoint.async_save=false") -> None:
        self._remedy = remedy
        self._memory = {pinned: torch.empty(0, dtype=torch.uint8) for pinned in (False, True)}
        self._block: PageLockedMemory | None = None  # the memory of self._memory[True]
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def copy(self, snapshot: Snapshot, linked: Collection[str] = ()) -> Snapshot:
        """Return `snapshot` with a copy of every live tensor that this rank writes, valid until the next call.
        Components in `linked` are not written and not copied. Raises UserError when memory for the copies is short."""
        written = [shards for folder, shards in snapshot.components.items() if folder not in linked]
        live = {folder: export for folder, export in snapshot.exports.items() if not export.is_copy}
        written += [export.shards for export in live.values()]
        # An export and a component may have the same shards. Copy them once.
        distinct = {id(shards): shards for shards in written}
        copies = iter(self._copies([s.local for shards in distinct.values() for s in shards.values() if s.saved_here]))
        staged = {
            key: {
                name: replace(shard, local=next(copies)) if shard.saved_here else shard
                for name, shard in shards.items()
            }
            for key, shards in distinct.items()
        }
        components = {
            folder: shards if folder in linked else staged[id(shards)] for folder, shards in snapshot.components.items()
        }
        exports = snapshot.exports | {
            folder: replace(export, shards=staged[id(export.shards)]) for folder, export in live.items()
        }
        return replace(snapshot, components=components, exports=exports)

    def _copies(self, live: list[Tensor]) -> list[Tensor]:
        used: Counter[bool] = Counter()
        starts = []
        for tensor in live:
            starts.append(used[tensor.is_cuda])
            used[tensor.is_cuda] += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        for pinned, nbytes in used.items():
            self._reserve(nbytes, pinned=pinned)
        copies = [
            self._memory[tensor.is_cuda][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(live, starts, strict=True)
        ]
        if used[True]:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for tensor, copy in zip(live, copies, strict=True):
                copy.copy_(tensor, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return copies

    def _reserve(self, nbytes: int, *, pinned: bool) -> None:
        if self._memory[pinned].nbytes >= nbytes:
            return
        self._memory[pinned] = torch.empty(0, dtype=torch.uint8)  # frees the old memory before the new allocation
        try:
            if pinned:
                self._block = None
                self._block = PageLockedMemory(nbytes)
                self._memory[pinned] = self._block.content
            else:
                self._memory[pinned] = torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise UserError(
                "There is no memory for the copy of the state that a background save writes "
                f"({nbytes / 2**20:.1f} MiB on this rank: {str(error).splitlines()[0]}). Set "
                f"{self._remedy}, or give the machine more memory."
            ) from error
