"""Share of a rank in each step's prompts: the next ones of the stream, nearly equally many on every rank."""

from rlhf.data import DrawnPrompt, Prompt, PromptStream
from rlhf.ranks.dims import RankGroup


class PromptShare:
    """Draws prompts for all ranks and keeps this rank's: `batch_size` of them per step, or another number on demand.

    `ranks` are those that hold different samples. Each rank's prompts are consecutive; with fewer prompts than ranks
    some have none. All ranks draw from equal streams, so nothing needs to be sent.
    """

    def __init__(self, stream: PromptStream, batch_size: int, ranks: RankGroup) -> None:
        self.batch_size = batch_size
        self._stream, self._ranks = stream, ranks

    def next(self, size: int | None = None) -> list[DrawnPrompt]:
        """This rank's of the next `size` prompts, by default of a step's."""
        drawn = self._stream.next(self.batch_size if size is None else size)
        low, high = (len(drawn) * rank // self._ranks.size for rank in (self._ranks.rank, self._ranks.rank + 1))
        return drawn[low:high]

    def prompt(self, uid: int) -> Prompt:
        """The prompt at a place of the stream."""
        return self._stream.at(uid)

    @property
    def position(self) -> int:
        """The uid of the next prompt."""
        return self._stream.state_dict()["consumed"]

    def advance_to(self, position: int) -> None:
        """Leave out the prompts before the uid `position`; never goes back to one that was drawn."""
        self._stream.load_state_dict(self._stream.state_dict() | {"consumed": max(position, self.position)})

    @property
    def epochs(self) -> float:
        """Passes over the data set before the next prompt."""
        return self._stream.epochs
