"""Generates each step's groups from new prompts, and leaves nothing to later steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rlhf.experience.begun import begun_from_tensors
from rlhf.experience.generation import Generation
from rlhf.experience.groups import Group
from rlhf.experience.metrics import RolloutStats
from rlhf.experience.prompt_share import PromptShare


@dataclass(frozen=True)
class NewPrompts:
    """The source of groups with `rollout.async_steps=0`."""

    prompts: PromptShare
    generation: Generation

    @property
    def position(self) -> int:
        """Uid of the first prompt not drawn yet."""
        return self.prompts.position

    def epochs(self) -> float:
        """Return the passes over the prompts so far."""
        return self.prompts.epochs

    def groups(self, size: int | None, stats: RolloutStats, step: int) -> list[Group]:
        """Return the scored groups of this rank's part of the next `size` prompts (None: `batch_size`).

        Collective. The policy has made `step` - 1 steps.
        """
        return self.generation.groups(self.prompts.next(size), stats, version=step - 1, step=step)

    def begin(self, stats: RolloutStats, step: int) -> None:
        """Do nothing: no generation runs while the ranks train."""

    def drop(self) -> None:
        """Do nothing: no prompt is in flight."""

    def tensors(self) -> dict[str, Tensor]:
        """Return no tensors: no prompt is in flight."""
        return {}

    def load_tensors(self, parts: Sequence[Mapping[str, Tensor]]) -> int:
        """Return the number of prompts in flight in `parts`, all of which are dropped."""
        return sum(len(begun_from_tensors(part, self.prompts.prompt)) for part in parts)
