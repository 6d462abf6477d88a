"""Share of a rank in each step's prompts: a mini-batch holds the same prompts at every number of ranks."""

from rlhf.data import DrawnPrompt, Prompt, PromptStream


class PromptShare:
    """Draws prompts for all ranks and keeps this rank's: `batch_size` of them per step, or another number on demand.

    The batch of a step is cut into mini-batches of consecutive prompts, and each mini-batch among the ranks; a rank's
    prompts stand in the order of mini-batches. All ranks draw from equal streams, so nothing needs to be sent.
    """

    def __init__(self, stream: PromptStream, batch_size: int, mini_batch_size: int, rank: int, world_size: int) -> None:
        self.batch_size, self.mini_batch_size = batch_size, mini_batch_size
        self._stream, self._rank, self._world_size = stream, rank, world_size

    def next(self, size: int | None = None) -> list[DrawnPrompt]:
        """This rank's prompts of the next step.

        With a `size`, so many prompts in one piece, each rank's consecutive; what they become part of is then the
        caller's business.
        """
        parts, length = (self.batch_size // self.mini_batch_size, self.mini_batch_size) if size is None else (1, size)
        drawn = self._stream.next(parts * length)
        low, high = (length * rank // self._world_size for rank in (self._rank, self._rank + 1))
        return [item for start in range(0, len(drawn), length) for item in drawn[start + low : start + high]]

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
