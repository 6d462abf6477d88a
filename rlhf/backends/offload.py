"""Offloads idle tensors: moves their storages to host memory and back in place."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, UntypedStorage, nn

from rlhf.errors import UserError
from rlhf.storage.page_locked import PageLockedMemory
from rlhf.storage.shards import Shards

ALIGNMENT = 64
"""Copies start at multiples of this many bytes, which is enough for any type."""


class Offload:
    """Keeps tensors in host memory except inside `on_device`.

    A storage with several views moves once. An offloaded storage has size 0. Tensors and views stay the same objects.
    GPU storages are copied to page-locked memory, which is reused. On a CPU offloading saves no memory.

    Args:
        find: returns the tensors, the same at every call; None offloads nothing.
        setting: name of the setting, for errors.
        frozen: returns the tensors that nothing writes on the device; each is copied to the host only once.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Tensor]] | None,
        setting: str,
        frozen: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._find, self._setting, self._frozen = find, setting, frozen
        self._users = 0
        # Offloaded storages with their host copies, by storage. Copies of GPU storages are the page-locked `_pinned`.
        self._away: dict[int, tuple[UntypedStorage, Tensor]] = {}
        # Host copies of frozen storages that are on the device. They stay valid, because nothing writes the storages.
        self._kept: dict[int, Tensor] = {}
        self._pinned: dict[int, Tensor] = {}
        self._blocks: list[PageLockedMemory] = []

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the tensors on their device in the block. Blocks may be nested.

        After an error the tensors stay on the device: the error ends the run, and another error would hide it.
        """
        self._move_back()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
        self.move_to_host()

    @torch.no_grad()
    def move_to_host(self) -> None:
        """Move the tensors to the host unless a block of `on_device` uses them.

        Raises:
            UserError: the host has too little memory.
        """
        if self._users or self._find is None:
            return
        found = [tensor.untyped_storage() for tensor in self._find()]
        here = {storage._cdata: storage for storage in found if storage.nbytes()}
        on_cuda = {key: storage for key, storage in here.items() if storage.device.type == "cuda"}
        self._pin({key: storage.nbytes() for key, storage in on_cuda.items() if key not in self._pinned})
        for key, storage in here.items():
            if (copy := self._kept.pop(key, None)) is None:
                # On a CPU, free each storage before the next one is copied, so that only one storage exists twice.
                with self._shortage_as_user_error(storage.nbytes()):
                    copy = self._pinned[key] if key in on_cuda else torch.empty(storage.nbytes(), dtype=torch.uint8)
                copy.copy_(_bytes_of(storage), non_blocking=True)
            self._away[key] = storage, copy
            storage.resize_(0)
        if on_cuda:
            # Wait for the copies: other threads may read them at once, and the rollout engine needs the freed memory.
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _move_back(self) -> None:
        frozen = {tensor.untyped_storage()._cdata for tensor in self._frozen()} if self._away else ()
        for key, (storage, copy) in list(self._away.items()):
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy, non_blocking=True)
            del self._away[key]
            if key in frozen:
                self._kept[key] = copy

    def current(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or the same view of its host copy if it is offloaded, valid until `on_device` begins."""
        if (found := self._away.get(tensor.untyped_storage()._cdata)) is None:
            return tensor
        return found[1].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def shards(self, shards: Shards) -> Shards:
        """Return `shards` with each local tensor replaced by its `current` view."""
        return {name: replace(shard, local=self.current(shard.local)) for name, shard in shards.items()}

    def guard(self, module: nn.Module) -> None:
        """Make calls of `module` raise RuntimeError while its tensors are offloaded."""

        def check(*_: object) -> None:
            if self._away:
                raise RuntimeError(f"{self._setting}=true: the model was called while its weights are on the host.")

        if self._find is not None:
            module.register_forward_pre_hook(check, prepend=True)

    def _pin(self, sizes: dict[int, int]) -> None:
        """Allocate page-locked memory for storages of these sizes in bytes."""
        if not sizes:
            return
        spans = {key: -(-size // ALIGNMENT) * ALIGNMENT for key, size in sizes.items()}
        length = sum(spans.values())
        with self._shortage_as_user_error(length):
            memory = PageLockedMemory(length)
        self._blocks.append(memory)
        for key, part in zip(sizes, memory.content.split([*spans.values()]), strict=True):
            self._pinned[key] = part[: sizes[key]]

    @contextmanager
    def _shortage_as_user_error(self, size: int) -> Iterator[None]:
        """Raise UserError if the allocation of `size` bytes in the block fails."""
        try:
            yield
        except RuntimeError as error:
            raise UserError(
                f"{self._setting}=true: the host has too little memory for the offloaded tensors "
                f"({size / 2**20:.1f} MiB on this rank; {error}). Set it to false, or use a machine with more memory."
            ) from error


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
