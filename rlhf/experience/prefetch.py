"""What is generated for the next step while this one trains (`rollout.async_steps`), and how it lies in a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf.data import Prompt
from rlhf.experience.generation import Generation, RolloutStats
from rlhf.experience.groups import Group, from_tensors, to_tensors
from rlhf.rollout import Request

PREFIX, COUNTS = "ahead.", "ahead.counts"


@dataclass
class Prefetch:
    """At most one generation: begun, then scored, by the time of the next save or of its own step. All ranks are at the same point."""

    generation: Generation
    position: int | None = field(default=None, init=False)
    """Where the stream of prompts stood before those of what has begun in this process."""
    _begun: tuple[list[Prompt], list[Request]] | None = field(default=None, init=False)
    _scored: tuple[list[Group], RolloutStats] | None = field(default=None, init=False)

    def begin(self, step: int, prompts: list[Prompt], requests: list[Request], position: int) -> None:
        """Start to generate for `step` with the present weights, and return. `position`: the stream's before `prompts`. Collective."""
        self.generation.begin(step, requests)
        self._begun, self.position = (prompts, requests), position

    def take(self, tally: RolloutStats) -> list[Group] | None:
        """This rank's scored groups for the step that comes now; None when no rank has any. Collective."""
        self._score()
        scored, self._scored, self.position = self._scored, None, None
        # After a load at another number of ranks some may have nothing.
        if scored is None or not any(self.generation.coordinator.gather(len(scored[0]))):
            return None
        groups, own = scored
        tally.add(own)
        return groups

    def drop(self) -> None:
        """Wait for what runs, and throw everything away. Collective."""
        if self._begun is not None:
            self.generation.sampler.finish(self.generation.driver.step)
        self._begun = self._scored = self.position = None

    def tensors(self) -> dict[str, Tensor]:
        """This rank's groups once they are scored, exactly; empty when there are none. Collective."""
        self._score()
        if self._scored is None or not self._scored[0]:
            return {}
        groups, tally = self._scored
        return to_tensors(groups, PREFIX) | {COUNTS: torch.tensor([tally.timeouts, tally.failures])}

    def load_tensors(self, parts: Sequence[dict[str, Tensor]], fits: Callable[[Group], bool]) -> int:
        """Hold the groups of several ranks' `tensors` that fit, when nothing runs; returns how many do not. On every rank or on none."""
        found = sorted((g for part in parts for g in from_tensors(part, PREFIX)), key=lambda group: group.uid)
        counts = [part[COUNTS].tolist() for part in parts if COUNTS in part]
        timeouts, failures = (sum(of_part[i] for of_part in counts) for i in (0, 1))
        groups = [group for group in found if fits(group)]
        scores = [score for group in groups for score in group.scores]
        self._scored, self.position = (groups, RolloutStats(scores, timeouts=timeouts, failures=failures)), None
        return len(found) - len(groups)

    def _score(self) -> None:
        if self._begun is not None:
            tally = RolloutStats()
            self._scored, self._begun = (self.generation.finish(*self._begun, tally), tally), None
