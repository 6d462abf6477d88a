"""Prefetch of the next step's generation while this one trains (`rollout.async_steps`), as part of a checkpoint."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf.data import DrawnPrompt
from rlhf.events import announce
from rlhf.experience.generation import Generation
from rlhf.experience.groups import Group, from_tensors, to_tensors
from rlhf.experience.metrics import RolloutStats
from rlhf.experience.prompt_share import PromptShare

PREFIX, COUNTS = "ahead.", "ahead.counts"


@dataclass
class Prefetch:
    """At most one generation: begun, then scored by the next save or its own step. All ranks are at the same point."""

    prompts: PromptShare
    generation: Generation
    _before: int | None = field(default=None, init=False)
    # The step and its prompts, while the engine is at them.
    _begun: tuple[int, list[DrawnPrompt]] | None = field(default=None, init=False)
    _scored: tuple[list[Group], RolloutStats] | None = field(default=None, init=False)

    @property
    def position(self) -> int:
        """The uid of the first prompt that is not drawn yet, but for those drawn ahead in this process."""
        return self.prompts.position if self._before is None else self._before

    def begin(self, step: int, size: int | None = None) -> None:
        """Draw prompts (see `PromptShare.next`), start to generate for `step` with the present weights, and return.

        The policy has done `step` - 2 steps. Collective.
        """
        self._before, drawn = self.prompts.position, self.prompts.next(size)
        self.generation.sampler.begin(self.generation.requests(drawn), version=step - 2, step=step)
        self._begun = step, drawn

    def take(self, stats: RolloutStats) -> list[Group] | None:
        """This rank's scored groups for the step that comes now; None when no rank has any. Collective."""
        self._score()
        scored, self._scored, self._before = self._scored, None, None
        # After a load at another number of ranks some may have nothing.
        if scored is None or not any(self.generation.coordinator.gather(len(scored[0]))):
            return None
        groups, own = scored
        stats.add(own)
        return groups

    def drop(self) -> None:
        """Wait for what runs, and throw everything away. Collective."""
        if self._begun is not None:
            self.generation.sampler.finish(self._begun[0] - 1)
        self._begun = self._scored = self._before = None

    def tensors(self) -> dict[str, Tensor]:
        """This rank's groups once they are scored, exactly; empty when there are none. Collective."""
        self._score()
        if self._scored is None or not self._scored[0]:
            return {}
        groups, stats = self._scored
        return to_tensors(groups, PREFIX) | {COUNTS: torch.tensor([stats.timeouts, stats.failures])}

    def load_tensors(self, parts: Sequence[dict[str, Tensor]]) -> int:
        """Hold the groups of several ranks' `tensors` that fit, when nothing runs; returns how many do not.

        On every rank or on none.
        """
        found = sorted((g for part in parts for g in from_tensors(part, PREFIX)), key=lambda group: group.uid)
        counts = [part[COUNTS].tolist() for part in parts if COUNTS in part]
        timeouts, failures = (sum(of_part[i] for of_part in counts) for i in (0, 1))
        groups = [group for group in found if self.generation.fits(group)]
        scores = [score for group in groups for score in group.scores]
        self._scored, self._before = (groups, RolloutStats(scores, timeouts=timeouts, failures=failures)), None
        return len(found) - len(groups)

    def _score(self) -> None:
        """Finish what runs: by now the policy has done `step` - 1 steps."""
        if self._begun is None:
            return
        (step, drawn), stats, generation = self._begun, RolloutStats(), self.generation
        announce("rollout.before")
        started = time.monotonic()
        samples = generation.by_prompt(generation.sampler.finish(step - 1))
        announce("rollout.after")
        stats.rollout_seconds = time.monotonic() - started
        self._scored, self._begun = (generation.scored(drawn, samples, stats), stats), None
