"""Draws each step's prompts from the stream and splits them nearly evenly over the ranks."""

from dataclasses import dataclass

from rlhf.data import DrawnPrompt, Prompt, PromptStream
from rlhf.ranks.dims import RankGroup


@dataclass(frozen=True)
class PromptShare:
    """Draws prompts for all ranks, by default `batch_size` per step, and returns this rank's part.

    `ranks` is the data-parallel group. Each rank gets consecutive prompts; some get none if there are fewer prompts
    than ranks. All ranks draw from equal streams, so they need no communication.
    """

    stream: PromptStream
    batch_size: int
    ranks: RankGroup

    def next(self, size: int | None = None) -> list[DrawnPrompt]:
        """Draw the next `size` prompts (None: `batch_size`) and return this rank's part."""
        drawn = self.stream.next(self.batch_size if size is None else size)
        low, high = (len(drawn) * rank // self.ranks.size for rank in (self.ranks.rank, self.ranks.rank + 1))
        return drawn[low:high]

    def share(self, size: int | None = None) -> int:
        """Return how many of the next `size` prompts (None: `batch_size`) are this rank's."""
        size, rank, ranks = self.batch_size if size is None else size, self.ranks.rank, self.ranks.size
        return size * (rank + 1) // ranks - size * rank // ranks

    def prompt(self, uid: int) -> Prompt:
        return self.stream.at(uid)

    @property
    def position(self) -> int:
        """Uid of the next prompt."""
        return self.stream.state_dict()["consumed"]

    def advance_to(self, position: int) -> None:
        """Skip the prompts before the uid `position`. Do nothing if they are already drawn."""
        self.stream.load_state_dict(self.stream.state_dict() | {"consumed": max(position, self.position)})

    @property
    def epochs(self) -> float:
        """Passes over the data set before the next prompt."""
        return self.stream.epochs

    def epochs_at(self, position: int) -> float:
        """Passes over the data set before the uid `position`."""
        return self.stream.epochs_at(position)
