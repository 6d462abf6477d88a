"""Page-locked host memory for copies from and to a GPU."""

import mmap
import weakref
from contextlib import suppress
from ctypes import CDLL

import torch
from torch import Tensor


class PageLockedMemory:
    """Page-locked host memory, allocated by `__init__` and freed when this object dies.

    torch's allocator of page-locked memory would round the size up to a power of two, and keep the memory.

    Attributes:
        content: [nbytes] uint8, starts at a page.

    Raises:
        RuntimeError: the host has too little memory.
    """

    def __init__(self, nbytes: int) -> None:
        # Allocate whole pages, because two blocks must not lock the same page.
        length = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        block = torch.empty(length + mmap.PAGESIZE, dtype=torch.uint8)
        block = block[-block.data_ptr() % mmap.PAGESIZE :][:length]
        if failed := int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), length, 1)):
            _clear_last_error()
            raise RuntimeError(f"cudaHostRegister: error {failed}")
        self.content = block[:nbytes]
        weakref.finalize(self, _unlock, block).atexit = False


def _clear_last_error() -> None:
    """Clear CUDA's last error, which the next kernel would report as its own. torch does not offer the call."""
    with suppress(OSError, AttributeError):
        # The dynamic loader returns the CUDA runtime that torch has already loaded.
        CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}").cudaGetLastError()


def _unlock(block: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
