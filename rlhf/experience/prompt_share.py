"""Draws each step's prompts from the stream and splits them nearly evenly over the ranks."""

from rlhf.data import DrawnPrompt, Prompt, PromptStream
from rlhf.ranks.dims import RankGroup


class PromptShare:
    """Draws prompts for all ranks, by default `batch_size` per step, and returns this rank's part.

    `ranks` is the data-parallel group. Each rank gets consecutive prompts; some get none if there are fewer prompts
    than ranks. All ranks draw from equal streams, so they need no communication.
    """

    def __init__(self, stream: PromptStream, batch_size: int, ranks: RankGroup) -> None:
        self.batch_size = batch_size
        self._stream, self._ranks = stream, ranks

    def next(self, size: int | None = None) -> list[DrawnPrompt]:
        """Draw the next `size` prompts (None: `batch_size`) and return this rank's part."""
        drawn = self._stream.next(self.batch_size if size is None else size)
        low, high = (len(drawn) * rank // self._ranks.size for rank in (self._ranks.rank, self._ranks.rank + 1))
        return drawn[low:high]

    def prompt(self, uid: int) -> Prompt:
        return self._stream.at(uid)

    @property
    def position(self) -> int:
        """Uid of the next prompt."""
        return self._stream.state_dict()["consumed"]

    def advance_to(self, position: int) -> None:
        """Skip the prompts before the uid `position`. Do nothing if they are already drawn."""
        self._stream.load_state_dict(self._stream.state_dict() | {"consumed": max(position, self.position)})

    @property
    def epochs(self) -> float:
        """Passes over the data set before the next prompt."""
        return self._stream.epochs
