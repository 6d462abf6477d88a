"""Generates for the next step while this step trains (`rollout.async_steps`). Checkpoints include these samples."""

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
from rlhf.experience.partial_rollouts import AHEAD as PREFIX
from rlhf.experience.partial_rollouts import begun_samples
from rlhf.experience.prompt_share import PromptShare

COUNTS = f"{PREFIX}counts"


@dataclass
class Prefetch:
    """Generates for at most one later step. Scores the samples at the next save or at their step, whichever is first.

    Either all ranks generate ahead or none does.
    """

    prompts: PromptShare
    generation: Generation
    _before: int | None = field(default=None, init=False)
    # The step of the running generation, and its prompts.
    _begun: tuple[int, list[DrawnPrompt]] | None = field(default=None, init=False)
    _scored: tuple[list[Group], RolloutStats] | None = field(default=None, init=False)

    @property
    def position(self) -> int:
        """Uid of the first prompt not drawn yet. Prompts drawn ahead count as not drawn."""
        return self.prompts.position if self._before is None else self._before

    def begin(self, step: int, size: int | None = None) -> None:
        """Draw `size` prompts (see `PromptShare.next`) and start the generation for `step`. Collective.

        The samples come from the current policy, which has made `step` - 2 training steps.
        """
        self._before, drawn = self.prompts.position, self.prompts.next(size)
        self.generation.sampler.begin(self.generation.requests(drawn), version=step - 2, step=step)
        self._begun = step, drawn

    def pop(self, stats: RolloutStats) -> list[Group] | None:
        """Return this rank's scored groups for the current step, or None if no rank has groups. Collective."""
        self._score()
        scored, self._scored, self._before = self._scored, None, None
        # After a load with another number of ranks, some ranks may have no groups.
        if scored is None or not any(self.generation.coordinator.all_gather(len(scored[0]))):
            return None
        groups, own = scored
        stats.add(own)
        return groups

    def groups(self, size: int | None, stats: RolloutStats, step: int) -> list[Group]:
        """Generate the scored groups of this rank's part of the next `size` prompts (None: `batch_size`) now.

        Collective. The policy has made `step` - 1 steps.
        """
        return self.generation.groups(self.prompts.next(size), stats, version=step - 1, step=step)

    def epochs(self) -> float:
        """Return the passes over the prompts so far."""
        return self.prompts.epochs

    def drop(self) -> None:
        """Wait for the running generation and drop all groups. Collective."""
        if self._begun is not None:
            self.generation.sampler.finish(self._begun[0] - 1)
        self._begun = self._scored = self._before = None

    def tensors(self) -> dict[str, Tensor]:
        """Finish and score the generation, and return this rank's groups as tensors. Collective."""
        self._score()
        if self._scored is None or not self._scored[0]:
            return {}
        groups, stats = self._scored
        return to_tensors(groups, PREFIX) | {COUNTS: torch.tensor([stats.timeouts, stats.failures])}

    def load_tensors(self, parts: Sequence[dict[str, Tensor]]) -> int:
        """Load the groups in `parts`, each the `tensors` of one rank. Drop groups that do not fit the settings.

        Return the number of dropped prompts, including prompts that partial rollouts had in flight. No generation may
        run. Call this on every rank or on none.
        """
        found = sorted((g for part in parts for g in from_tensors(part, PREFIX)), key=lambda group: group.uid)
        counts = [part[COUNTS].tolist() for part in parts if COUNTS in part]
        timeouts, failures = (sum(of_part[i] for of_part in counts) for i in (0, 1))
        groups = [group for group in found if self.generation.fits(group)]
        scores = [score for group in groups for score in group.scores]
        self._scored, self._before = (groups, RolloutStats(scores, timeouts=timeouts, failures=failures)), None
        begun = {sample.uid for part in parts for sample in begun_samples(part)}
        return len(found) - len(groups) + len(begun)

    def _score(self) -> None:
        """Finish and score the running generation, if any. The policy has made `step` - 1 steps by now."""
        if self._begun is None:
            return
        (step, drawn), stats, generation = self._begun, RolloutStats(), self.generation
        announce("rollout.before")
        started = time.monotonic()
        samples = generation.by_prompt(generation.sampler.finish(step - 1))
        announce("rollout.after")
        stats.rollout_seconds = time.monotonic() - started
        self._scored, self._begun = (generation.scored(drawn, samples, stats), stats), None
