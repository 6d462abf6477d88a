"""Stands in for CUDA's page locks on a machine without a GPU."""

import pytest
import torch

from rlhf.storage import page_locked


class PageLocks:
    """CUDA's runtime as far as it locks pages.

    `spans` has the length of each locked span by address. `last_error` stays until it is read.
    """

    def __init__(self) -> None:
        self.spans: dict[int, int] = {}
        self.failure = self.last_error = 0

    def cudaHostRegister(self, address: int, length: int, _: int) -> int:
        if not self.failure:
            assert all(address + length <= first or first + size <= address for first, size in self.spans.items())
            self.spans[address] = length
        self.last_error = self.failure or self.last_error
        return self.failure

    def cudaGetLastError(self) -> int:
        found, self.last_error = self.last_error, 0
        return found

    def cudaHostUnregister(self, address: int) -> int:
        del self.spans[address]
        return 0


def stand_in(monkeypatch: pytest.MonkeyPatch) -> PageLocks:
    locks = PageLocks()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: locks)
    monkeypatch.setattr(page_locked, "CDLL", lambda name: locks)
    return locks
