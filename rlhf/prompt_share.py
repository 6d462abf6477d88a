"""This rank's share of each step's prompts, dealt so that a mini-batch holds the same prompts at every number of ranks."""

from typing import Any

from rlhf.data import Prompt, PromptStream
from rlhf.rollout import Request


class PromptShare:
    """Draws `train_batch_size` prompts per step for all ranks and keeps this rank's.

    The batch is cut into mini-batches of consecutive prompts, and each mini-batch among the ranks; a rank's prompts stand in the order of
    mini-batches. All ranks draw from equal streams, so nothing needs to be sent.
    """

    def __init__(
        self, stream: PromptStream, train_batch_size: int, mini_batch_size: int, rank: int, world_size: int
    ) -> None:
        self._stream, self._size, self._mini_size = stream, train_batch_size, mini_batch_size
        self._rank, self._share = rank, mini_batch_size // world_size
        self.mini_batches = train_batch_size // mini_batch_size

    def next(self) -> tuple[list[Prompt], list[Request]]:
        """This rank's prompts of the next step, and what to ask the rollout engine for; a uid is a place in the stream of all prompts."""
        drawn = self._stream.next(self._size)
        starts = (m * self._mini_size + self._rank * self._share for m in range(self.mini_batches))
        mine = [item for start in starts for item in drawn[start : start + self._share]]
        return [prompt for _, prompt in mine], [Request(uid, prompt.token_ids) for uid, prompt in mine]

    @property
    def epoch(self) -> int:
        """Passes over the data set begun before the next prompt."""
        return self._stream.epoch

    def state_dict(self) -> dict[str, Any]:
        """The stream's state."""
        return self._stream.state_dict()
