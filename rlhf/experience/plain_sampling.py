"""Fills each batch with the groups of the next prompts, without selection by reward."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.experience.groups import Group, uids_everywhere
from rlhf.experience.metrics import RolloutStats
from rlhf.experience.prefetch import Prefetch

log = logging.getLogger(__name__)


@dataclass
class PlainSampling:
    """Fills a batch with one generation and carries nothing over."""

    prefetch: Prefetch
    gen_batch_size: None = field(default=None, init=False)
    """Prompts per generation; None for the prompts of a step."""

    def sample(self, step: int, stats: RolloutStats) -> tuple[list[Group], dict[str, float]]:
        """Return the groups of this rank's part of the next prompts, sorted by uid, and no metrics. Collective."""
        prompts, generation = self.prefetch.prompts, self.prefetch.generation
        if (ahead := self.prefetch.pop(stats)) is not None:
            found, wanted = len(uids_everywhere(ahead, generation.coordinator)), prompts.batch_size
            if found == wanted:
                return ahead, {}
            log.warning(
                "Dropped %d prompts of the checkpoint, with samples generated for step %d: "
                "data.train_batch_size is now %d.",
                found,
                step,
                wanted,
            )
        return generation.groups(prompts.next(), stats, version=step - 1, step=step), {}

    def starts_full(self) -> bool:
        """Return False: every batch needs a generation."""
        return False

    @property
    def carried(self) -> list[Group]:
        """No groups."""
        return []

    def carry(self, groups: Sequence[Group]) -> None:
        """Drop a checkpoint's carried groups and log a warning."""
        if groups:
            log.warning(
                "Dropped %d prompts of the checkpoint, with samples that dynamic sampling carried over: "
                "algorithm.filter_groups.enable=false.",
                len(groups),
            )
