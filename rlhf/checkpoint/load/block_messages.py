"""Defines the message with one block of a checkpoint file that a rank sends to a rank of another node.

The first byte is 1 if the sender could read the block.
"""

import torch
from torch import Tensor

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hashing import BLOCK
from rlhf.storage.reading import CheckedFiles


class BlockMessage:
    """Reuses memory for one message after another. `tensor` is the present message (uint8)."""

    def __init__(self) -> None:
        self._memory = torch.empty(1 + BLOCK, dtype=torch.uint8)
        self.tensor = self._memory

    def resize(self, files: CheckedFiles, name: str, number: int) -> Tensor:
        """Begin a message for a block of a file. Return the message, whose content is undefined."""
        self.tensor = self._memory[: 1 + min(BLOCK, files.size(name) - number * BLOCK)]
        return self.tensor

    def load(self, files: CheckedFiles, name: str, number: int) -> Exception | None:
        """Read and verify the block. Return the error if this fails; the message then reports a failure."""
        self.resize(files, name, number)
        try:
            files.read(name, [(number * BLOCK, self.content)])
        except (DamagedCheckpoint, OSError) as error:
            self.tensor[0] = 0
            return error
        self.tensor[0] = 1
        return None

    @property
    def has_block(self) -> bool:
        """Whether the sender could read the block."""
        return bool(self.tensor[0])

    @property
    def content(self) -> memoryview:
        return self.tensor.numpy().data[1:]
