"""Tensors that leave their device while they sit idle: storages move to the host's memory, and come back in place."""

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, UntypedStorage, nn

from rlhf.errors import UserError
from rlhf.storage.shards import Shards

ALIGNMENT = 64
"""Bytes between the beginnings of copies, which any type can be read from."""


class Offload:
    """Tensors that are in the host's memory, except where `on_device` asks for them.

    Their storages move, each once whatever is a view of it, and are empty meanwhile: tensors and views stay the same
    objects. Copies of what lies on a GPU are in page-locked memory, which is kept. On a CPU nothing is gained.

    Args:
        find: the tensors, the same ones at any time; None offloads nothing.
        setting: what the user calls it.
    """

    def __init__(self, find: Callable[[], Iterable[Tensor]] | None, setting: str) -> None:
        self._find, self._setting = find, setting
        self._users = 0
        # By storage: what is away, with its bytes, and where the bytes of a GPU's storages go.
        self._away: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._pinned: dict[int, Tensor] = {}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the tensors on their device in the block; blocks may be nested.

        After an error they stay there: it ends the run, and its cause is not to be hidden by another one.
        """
        self._move_back()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
        self.leave()

    @torch.no_grad()
    def leave(self) -> None:
        """Move to the host what is not in use.

        Raises:
            UserError: the host has no memory for it.
        """
        if self._users or self._find is None:
            return
        found = [tensor.untyped_storage() for tensor in self._find()]
        here = {storage._cdata: storage for storage in found if storage.nbytes()}
        on_cuda = {key: storage for key, storage in here.items() if storage.device.type == "cuda"}
        self._pin({key: storage.nbytes() for key, storage in on_cuda.items() if key not in self._pinned})
        for key, storage in here.items():
            # On a CPU there is one copy at a time beside what has not left yet.
            copy = self._pinned[key] if key in on_cuda else self._host_memory(storage.nbytes())
            copy.copy_(_bytes_of(storage), non_blocking=True)
            self._away[key] = storage, copy
            storage.resize_(0)
        if on_cuda:
            # The copies are for anybody to read, and the memory is for the rollout engine to take.
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _move_back(self) -> None:
        for key, (storage, copy) in list(self._away.items()):
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy, non_blocking=True)
            del self._away[key]

    def held(self, tensor: Tensor) -> Tensor:
        """`tensor`, or while it is away the same view of its bytes on the host, good until it comes back."""
        if (found := self._away.get(tensor.untyped_storage()._cdata)) is None:
            return tensor
        return found[1].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def shards(self, shards: Shards) -> Shards:
        """`shards` with what is `held` of each."""
        return {name: replace(shard, local=self.held(shard.local)) for name, shard in shards.items()}

    def watch(self, module: nn.Module) -> None:
        """Have `module` refuse to be called while its tensors are away: it would read memory that is not there.

        Raises:
            RuntimeError: by the call.
        """

        def check(*_: object) -> None:
            if self._away:
                raise RuntimeError(f"{self._setting}=true: the model was called while its weights are on the host.")

        if self._find is not None:
            module.register_forward_pre_hook(check, prepend=True)

    def _pin(self, sizes: dict[int, int]) -> None:
        """Page-locked memory for storages of these sizes in bytes.

        torch's own would be rounded up to the next power of two.
        """
        if not sizes:
            return
        spans = {key: -(-size // ALIGNMENT) * ALIGNMENT for key, size in sizes.items()}
        # Whole pages, since two blocks may not lock the same one.
        length = -(-sum(spans.values()) // mmap.PAGESIZE) * mmap.PAGESIZE
        block = self._host_memory(length + mmap.PAGESIZE)
        block = block[-block.data_ptr() % mmap.PAGESIZE :][:length]
        if failed := int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), length, 1)):
            raise self._no_memory(length, f"cudaHostRegister: error {failed}")
        weakref.finalize(self, _unpin, block).atexit = False
        for key, part in zip(sizes, block.split([*spans.values(), length - sum(spans.values())]), strict=False):
            self._pinned[key] = part[: sizes[key]]

    def _host_memory(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise self._no_memory(size, str(error)) from error

    def _no_memory(self, size: int, reason: str) -> UserError:
        return UserError(
            f"{self._setting}=true: the host has no memory for what leaves the device ({size / 2**20:.1f} MiB on this "
            f"rank; {reason}). Set it to false, or give the machine more memory."
        )


def _unpin(block: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
