"""Keeps the responses of several steps in flight (`rollout.async_steps`); checkpoints include them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlhf.experience.begun import Begun, begun_from_tensors, begun_to_tensors, replaced
from rlhf.experience.generation import Generation
from rlhf.experience.groups import Group
from rlhf.experience.metrics import RolloutStats
from rlhf.experience.prompt_share import PromptShare
from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout.engine import Quota

RESERVE = 4
"""When a step begins, 1 + 1 / RESERVE shares of complete groups should be waiting (see `PartialRollouts`). With this
value, no step in `benchmarks.async_steps` waited for a batch, although the lengths of responses vary."""


@dataclass
class PartialRollouts:
    """Generates until this rank's share of a batch is complete, and continues the other responses in later steps.

    A share is the number of a rank's prompts in a batch. A step draws new prompts (`_drawn`), generates with its
    weights until one share is complete, and trains on this share: prompts with the oldest tokens first, then by uid.
    Servers continue the other prompts while the ranks train (`begin`); a prompt begins when a server has a free slot.

    No token gets older than `max_staleness` steps. The engine waits for groups that are due in this step, because
    dropping old responses would drop mostly long ones. If more than a share is due (after a change of the number
    of ranks or of the batch size), the surplus is dropped, counted, and replaced by new prompts.

    With the embedded engine, all of this follows from tokens and settings, never from the clock, so a resumed run
    repeats it bit for bit. With servers, the clock decides how many tokens the responses have when the weights change.
    Everything else follows from these tokens, so a journal of the samples is enough to repeat a run.
    """

    prompts: PromptShare
    generation: Generation
    steps: int
    """Largest number of shares in flight after a step, `rollout.async_steps`."""
    max_staleness: int
    """Largest age of a token in steps, at least `steps`."""
    expired: int = field(default=0, init=False)
    """Number of this rank's prompts that were dropped because of their age, since the last `pop_expired`."""
    begun: list[Begun] = field(default_factory=list, init=False)
    """This rank's prompts in flight, sorted by uid."""
    _stopped_in: int | None = field(default=None, init=False)
    """Step of the last `_stop`, which ends the background generation and stores its samples in the journal."""

    @property
    def position(self) -> int:
        """Uid of the first prompt not drawn yet."""
        return self.prompts.position

    @property
    def partial_samples(self) -> int:
        """Number of this rank's unfinished samples that have tokens."""
        return sum(each.partial_samples for each in self.begun)

    def pop_expired(self) -> int:
        """Return the number of prompts of this rank that were dropped because of their age since the last call."""
        expired, self.expired = self.expired, 0
        return expired

    def epochs(self) -> float:
        """Return how many times the run has passed over the prompts; prompts in flight do not count. Collective."""
        in_flight = sum(self.generation.coordinator.all_gather(len(self.begun)))
        return self.prompts.epochs_at(self.prompts.position - in_flight)

    def begin(self, stats: RolloutStats, step: int) -> None:
        """Let servers continue the prompts in flight, by the policy after `step` - 1 steps, while the ranks train.

        Collective. Start nothing without a `BackgroundEngine`, or if any rank's journal has a file of the next step.
        """
        sampler, journal = self.generation.sampler, self.generation.journal
        if not sampler.background:
            return
        if self._stopped_in != step:  # True if the step needed no generation
            self._stop(stats, step)
        known = journal is not None and journal.has(step + 1)
        if not sampler.runs and not any(self.generation.coordinator.all_gather(known)):
            sampler.begin(self.generation.continued(self.begun), version=step - 1, step=step)

    def groups(self, size: int | None, stats: RolloutStats, step: int) -> list[Group]:
        """Return this rank's scored groups of a batch of `size` prompts (None: `batch_size`), sorted by uid.

        Collective. The policy has made `step` - 1 steps.
        """
        share, version = self.prompts.share(size), step - 1
        self._stop(stats, step)
        self._drop_old(version - self.max_staleness)
        self._top_up(share)
        coordinator = self.generation.coordinator
        while any(coordinator.all_gather(self._missing(share, version) != [])):
            # After a change of the number of ranks, a generation from the journal may end before it reaches the quotas.
            self.generation.score_early(self.begun)
            unfinished, quotas = self._unfinished(), self._missing(share, version)
            self._update(self.generation.advance(unfinished, quotas, stats, version=version, step=step))
        complete = [each for each in self.begun if each.complete]
        chosen = sorted(complete, key=lambda each: (each.oldest(version), each.drawn.uid))[:share]
        uids = {each.drawn.uid for each in chosen}
        batch = [each for each in self.begun if each.drawn.uid in uids]
        self.begun = [each for each in self.begun if each.drawn.uid not in uids]
        self._drop_old(version + 1 - self.max_staleness)
        groups = self.generation.scored([each.drawn for each in batch], [each.samples for each in batch], stats)
        self.generation.score_early(self.begun)  # while the ranks train
        return groups

    def drop(self) -> None:
        """Drop all prompts in flight. Collective."""
        self.generation.sampler.stop()
        self.begun = []
        self.generation.score_early([])

    def tensors(self) -> dict[str, Tensor]:
        """End the generation in the background, and return this rank's samples in flight as tensors. Collective."""
        begun = self._unfinished()
        samples = replaced(begun, self.generation.sampler.stop())
        self._update([Begun(each.drawn, of_prompt) for each, of_prompt in zip(begun, samples, strict=True)])
        return begun_to_tensors(self.begun)

    def load_tensors(self, parts: Sequence[Mapping[str, Tensor]]) -> int:
        """Replace the prompts in flight by those in `parts`, each the `tensors` of one rank. No generation may run.

        Return the number of dropped prompts, which do not fit the settings.
        """
        found = [each for part in parts for each in begun_from_tensors(part, self.prompts.prompt)]
        fitting = [each for each in found if self._fits(each)]
        self.begun, self._stopped_in = sorted(fitting, key=lambda each: each.drawn.uid), None
        return len(found) - len(fitting)

    def _stop(self, stats: RolloutStats, step: int) -> None:
        """End the generation in the background, and store its samples in the journal. Collective.

        Store complete samples, too: an earlier save may have ended the generation that made them, and a replay may not
        repeat that save.
        """
        if self.generation.sampler.background:
            self.begun = self.generation.stop(self.begun, stats)
            self._stopped_in = step

    def _unfinished(self) -> list[Begun]:
        return [each for each in self.begun if not each.complete]

    def _update(self, changed: Sequence[Begun]) -> None:
        new = {each.drawn.uid: each for each in changed}
        self.begun = [new.get(each.drawn.uid, each) for each in self.begun]

    def _fits(self, each: Begun) -> bool:
        room = all(len(s) < self.generation.params.max_tokens for s in each.samples if s.finish_reason == "partial")
        return room and len(each.samples) == self.generation.samples_per_prompt

    def _top_up(self, share: int) -> None:
        """Draw this step's new prompts. Collective."""
        ranks = self.prompts.ranks
        needs = self.generation.coordinator.all_gather((ranks.rank, self._drawn(share)))
        of_ranks = dict(needs)  # the processes of one data-parallel rank need the same prompts
        counts = [of_ranks[rank] for rank in range(ranks.size)]
        first = sum(counts[: ranks.rank])
        drawn = self.prompts.stream.next(sum(counts))[first : first + counts[ranks.rank]]
        self.begun += [self.generation.unbegun(each) for each in drawn]

    def _drawn(self, share: int) -> int:
        """Return how many prompts this rank draws in a step, so that 2 to `steps` + 1 shares are then in flight.

        Complete groups that wait get older for nothing. If a share and a reserve are complete when a step begins, then
        generation keeps pace with training, and the step draws as many prompts as it removes. It draws fewer if more
        groups are complete, and more if fewer are.
        """
        complete = sum(each.complete for each in self.begun)
        missing = share + math.ceil(share / RESERVE) - complete
        in_flight = min(max(len(self.begun) + share + missing, 2 * share), (self.steps + 1) * share)
        return max(0, in_flight - len(self.begun))

    def _missing(self, share: int, version: int) -> list[Quota]:
        """Return the quotas of unfinished groups that this batch still needs.

        A group whose oldest token is of version v must be in the batch of version v + `max_staleness` or an earlier
        one. Each batch removes one share. So of the groups that are due within d batches, all but d - 1 shares must be
        complete now.
        """
        ages = {each.drawn.uid: version - each.oldest(version) for each in self.begun}
        quotas = []
        for age in range(min(self.max_staleness, max(ages.values(), default=0)), -1, -1):
            due = [each for each in self.begun if ages[each.drawn.uid] >= age]
            # `later` batches can still remove groups of this age. At age 0, groups of any age fill the share.
            later = self.max_staleness - age
            needed = min(share, len(due) - later * share) if age else share
            missing = needed - sum(each.complete for each in due)
            if missing > 0:
                quotas.append(Quota(frozenset(each.drawn.uid for each in due if not each.complete), missing))
        return quotas

    def _drop_old(self, oldest: int) -> None:
        young = [each for each in self.begun if each.oldest(oldest) >= oldest]
        self.expired += len(self.begun) - len(young)
        self.begun = young


def partial_metrics(
    source: PartialRollouts, groups: Sequence[Group], coordinator: Coordinator, *, version: int
) -> dict[str, float]:
    """Return metrics of the prompts in flight, and of the ages of the tokens in the batch `groups`. Collective.

    `version` is the number of training steps so far.
    """
    ages: Counter[int] = Counter()
    for sample in (sample for group in groups for sample in group.samples):
        start = 0
        for drawn_by, end in sample.versions:
            ages[version - drawn_by] += int(sample.mask()[start:end].sum())
            start = end
    gathered = coordinator.all_gather((ages, source.partial_samples, source.pop_expired()))
    total = sum((of_rank for of_rank, _, _ in gathered), Counter[int]())
    return {
        "sampling/token_staleness_p50": quantile(total, 0.5),
        "sampling/token_staleness_p95": quantile(total, 0.95),
        "sampling/token_staleness_max": max(total, default=0),
        "sampling/partial_samples": sum(samples for _, samples, _ in gathered),
        "sampling/prompts_expired": sum(expired for _, _, expired in gathered),
    }


def quantile(counts: Mapping[int, int], share: float) -> int:
    """Return the smallest value v for which at least the fraction `share` of the counted values are at most v."""
    below, needed = 0, share * sum(counts.values())
    for value in sorted(counts):
        below += counts[value]
        if below >= needed:
            return value
    return 0
