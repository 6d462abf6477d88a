"""Fills the batch of each step with the next prompts' groups, or with groups that have a signal (dynamic sampling)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.config import FilterGroupsConfig
from rlhf.errors import UserError
from rlhf.experience.groups import Group, uids_everywhere
from rlhf.experience.metrics import RolloutStats
from rlhf.experience.new_prompts import NewPrompts
from rlhf.experience.partial_rollouts import PartialRollouts

log = logging.getLogger(__name__)

LARGE_SHARE = 0.5
"""Fraction of carried groups in a batch above which the leader logs a warning. verl and DAPO carry none over."""


@dataclass
class PlainSampling:
    """Fills each batch with the groups of the next prompts, without selection by reward. Carries nothing over."""

    source: NewPrompts | PartialRollouts

    def sample(self, step: int, stats: RolloutStats) -> tuple[list[Group], dict[str, float]]:
        """Return the groups of this rank's part of the next prompts, sorted by uid, and no metrics. Collective."""
        return self.source.groups(None, stats, step), {}

    @property
    def carried(self) -> list[Group]:
        return []

    def carry(self, groups: Sequence[Group]) -> None:
        """Drop a checkpoint's carried groups and log a warning."""
        if groups:
            log.warning(
                "Dropped %d prompts of the checkpoint, with samples that dynamic sampling carried over: "
                "algorithm.filter_groups.enable=false.",
                len(groups),
            )


@dataclass
class DynamicSampling:
    """Fills a batch with groups whose samples differ in reward (DAPO, arXiv 2503.14476, section 3.2).

    Drops other groups, which have no advantage, unless `on_limit=fill` needs them. Carries surplus groups over to the
    next step, where they come before newer groups. Drops carried groups whose policy is more than `max_staleness` steps
    old. Groups stay on the rank that generated them. All ranks make the same choice.
    """

    config: FilterGroupsConfig
    gen_batch_size: int
    """Prompts per generation, over all ranks."""
    max_staleness: int
    source: NewPrompts | PartialRollouts
    carried: list[Group] = field(default_factory=list, init=False)
    """This rank's groups for the next step, sorted by uid."""
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.prompts, self.generation = self.source.prompts, self.source.generation
        self.coordinator = self.generation.coordinator

    def sample(self, step: int, stats: RolloutStats) -> tuple[list[Group], dict[str, float]]:
        """Return this rank's groups of a full batch, sorted by uid, and `sampling/...` metrics. Collective.

        Raises:
            UserError: `max_num_gen_batches` generations do not fill the batch; with `on_limit=fill`, only if groups
                without signal do not fill it either.
        """
        wanted, drawn, metric = self.prompts.batch_size, self.gen_batch_size, self.config.metric
        # A resume may have changed `max_staleness`, so check the carried groups again.
        kept, dropped, rounds = self._young(self.carried, step), list[Group](), 0
        expired = len(self.carried) - len(kept)
        uids = uids_everywhere(kept, self.coordinator)
        carried = set(uids)
        while len(uids) < wanted and rounds < self.config.max_num_gen_batches:
            rounds += 1
            fresh = self.source.groups(drawn, stats, step)
            kept = kept + [group for group in fresh if group.has_signal(metric)]
            # Keep only the newest `wanted` groups without signal, because on_limit=fill uses no more. Drop groups whose
            # samples all failed: they have no reward, and a batch of only such groups would raise a KeyError.
            spare = [group for group in fresh if not group.has_signal(metric) and any(group.has_score)]
            dropped = (dropped + spare)[-wanted:]
            uids = uids_everywhere(kept, self.coordinator)
        chosen = set(uids[:wanted])
        missing = wanted - len(chosen)
        if missing:
            others = uids_everywhere(dropped, self.coordinator)
            self._check_limit(step, len(uids), len(others), len(carried))
            chosen |= set(others[-missing:])
        left = [group for group in kept if group.uid not in chosen]
        self.carried = self._young(left, step + 1)
        expired += len(left) - len(self.carried)
        counts = self.coordinator.all_gather((len(self.carried), expired))
        share_carried = len(carried & chosen) / wanted
        self._warn(step, share_carried)
        metrics: dict[str, float] = {
            "sampling/gen_batches": rounds,
            "sampling/groups_generated": rounds * drawn,
            "sampling/groups_dropped": rounds * drawn - (len(uids) - len(carried)),
            "sampling/groups_carried": sum(left_for_later for left_for_later, _ in counts),
            "sampling/groups_expired": sum(too_old for _, too_old in counts),
            "sampling/groups_filled": missing,
            "sampling/carried_share": share_carried,
        }
        return sorted((g for g in kept + dropped if g.uid in chosen), key=lambda group: group.uid), metrics

    def carry(self, groups: Sequence[Group]) -> None:
        self.carried = sorted(groups, key=lambda group: group.uid)

    def _young(self, groups: Sequence[Group], step: int) -> list[Group]:
        oldest = step - 1 - self.max_staleness
        return [group for group in groups if group.version >= oldest]

    def _warn(self, step: int, share_carried: float) -> None:
        if share_carried <= LARGE_SHARE or self._warned or not self.coordinator.is_leader:
            return
        self._warned = True
        log.warning(
            "%.0f %% of the batch of step %d was carried over from earlier steps, so an older policy sampled it; "
            "truncated importance sampling corrects for the difference. For newer samples lower "
            "data.gen_batch_size=%d, or rollout.max_staleness (at least rollout.async_steps), which drops older "
            "groups. This is logged once; sampling/carried_share is the share in each step.",
            100 * share_carried,
            step,
            self.gen_batch_size,
        )

    def _check_limit(self, step: int, with_signal: int, without: int, carried: int) -> None:
        config, wanted = self.config, self.prompts.batch_size
        facts = (
            f"Step {step} needs data.train_batch_size={wanted} prompts whose samples differ in "
            f"algorithm.filter_groups.metric={config.metric}, and has {with_signal} ({carried} of them from earlier "
            f"steps) after algorithm.filter_groups.max_num_gen_batches={config.max_num_gen_batches} generations of "
            f"{self.gen_batch_size} prompts"
        )
        if config.on_limit == "stop":
            raise UserError(
                f"{facts}. Raise max_num_gen_batches, use prompts that the policy solves sometimes but not always, "
                "or set algorithm.filter_groups.on_limit=fill to train on prompts without signal, too."
            )
        if with_signal + without < wanted:
            raise UserError(
                f"{facts}. With the {without} prompts without signal, the batch still has too few prompts. Raise "
                f"max_num_gen_batches or data.gen_batch_size: their product must be at least {wanted}, "
                "not counting prompts whose environments failed for all samples."
            )
