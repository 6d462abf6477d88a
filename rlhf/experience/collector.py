"""From prompts to a scored batch: rollouts, rewards, and DAPO's dynamic sampling with what it leaves for the next step."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf.batch import Batch, collate
from rlhf.checkpoint.driver_state import DriverState
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.experience.generation import Generation, RolloutStats
from rlhf.experience.groups import Group, from_tensors, to_tensors
from rlhf.experience.journal import combined, digests
from rlhf.experience.metrics import Summary, merge, slowest, step_metrics
from rlhf.experience.prefetch import Prefetch
from rlhf.experience.prompt_share import PromptShare
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward.settings import REWARD_MODEL
from rlhf.rollout import Request

log = logging.getLogger(__name__)


@dataclass
class Collector:
    """Collects the batch of each step. The groups that a step has left over are its state, on the rank that generated them.

    With `algorithm.filter_groups` (DAPO, arXiv 2503.14476, section 3.2) groups whose samples all have the same reward, and so no
    advantage, are dropped, and prompts are drawn until `data.train_batch_size` others are there. Those that are too many are trained on
    in the next step, before newer ones.

    With `rollout.async_steps` the batch of a step, or the first generation of its dynamic sampling, begins when the batch before is
    collected: it is by the policy as it was a step earlier. What runs is part of the state: a save waits for it.
    """

    config: Config
    prompts: PromptShare
    generation: Generation
    coordinator: Coordinator
    driver: DriverState
    device: torch.device
    _ahead: Prefetch = field(init=False)
    _carried: list[Group] = field(default_factory=list, init=False)
    # The last step of this process, and a hash of its batch over all ranks.
    _trained: tuple[int, str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._ahead = Prefetch(self.generation)

    def collect(self, step: int) -> tuple[Batch, dict[str, float], int]:
        """This rank's part of the batch of `step`, metrics over all ranks, and the batch's tokens on all ranks. Collective.

        New samples are by the policy after `driver.step` steps, or one less where they were begun ahead, their noise keyed by `step`.
        Of each mini-batch every rank gets an equal part, mini-batch after mini-batch; groups are contiguous.

        Raises:
            UserError: dynamic sampling can't fill the batch.
        """
        generation = self.generation
        sampler, journal = generation.sampler, generation.journal
        tally, generated_before = RolloutStats(), sampler.seconds
        if journal is not None:
            before = self._trained[1] if self._trained is not None and self._trained[0] == step - 1 else None
            journal.begin(step, self.driver.step, before)
        if self.config.algorithm.filter_groups.enable:
            groups, metrics = self._sample_dynamically(step, tally)
        else:
            groups, metrics = self._sample(step, tally), {}
        sampler.rest()
        if journal is not None:
            self._trained = (step, combined(self.coordinator.gather(digests(groups))))
        samples, results = [s for g in groups for s in g.samples], [r for g in groups for r in g.results]
        requests = [Request(group.uid, group.prompt_ids) for group in groups]
        batch = collate(requests, samples, generation.tokenizer.pad_token_id, self.device)
        batch.scores = self._floats([score for group in groups for score in group.scores])
        if generation.greedy_baseline:
            batch.baselines = self._floats([g.baseline for g in groups for _ in g.samples])
        figures, tokens = step_metrics(batch, results, generation.params.max_tokens, self.coordinator)
        own_seconds = sampler.seconds - generated_before
        if REWARD_MODEL not in self.config.reward.functions:  # for which ranks wait for each other
            own_seconds += tally.reward_seconds
        metrics |= slowest(self.coordinator.gather(own_seconds)) | sampler.metrics()
        metrics |= self._further_metrics(groups, tally)
        if self.config.rollout.async_steps and step < self.driver.total_steps:
            self._run_ahead(step + 1)
        return batch, figures | metrics, tokens

    def finish(self) -> None:
        """Remove what only a crash would still have needed, now that the run's last step is saved."""
        if (journal := self.generation.journal) is not None:
            journal.drop_published(up_to=self.driver.step)

    def skip_to(self, position: int | None) -> None:
        """Forget the prompts before the uid `position`, those carried over included; None leaves out nothing."""
        if position is not None:
            self._ahead.drop()
            self.prompts.skip_to(position)
            self._carried = []

    def forget(self) -> None:
        """Throw away what is generated for the next step, and the engine's weights: a roll-back makes them others. Collective."""
        self._ahead.drop()
        self.generation.sampler.forget()

    @property
    def position(self) -> int:
        """The uid of the first prompt after those of the newest batch, whatever has been drawn ahead."""
        return self.prompts.position if self._ahead.position is None else self._ahead.position

    def _floats(self, values: list[float | None]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _further_metrics(self, groups: list[Group], tally: RolloutStats) -> dict[str, float]:
        """Figures of all that the step generated, and of how its batch was put together."""
        mine = {
            "timeouts": Summary.of([tally.timeouts]),
            "failures": Summary.of([tally.failures]),
            "generated": Summary.of(tally.scores),
            "staleness": Summary.of(self.driver.step - s.version for group in groups for s in group.samples),
            "overlong": Summary.of(penalty for group in groups for penalty in group.penalties),
            "journal_samples": Summary.of(tally.journaled),
            "journal_bytes": Summary.of([0 if self.generation.journal is None else self.generation.journal.written]),
        }
        every = merge(mine, self.coordinator)
        metrics = {
            "data/epoch": self.prompts.epoch,
            "reward/timeouts": every["timeouts"].total,
            "reward/failures": every["failures"].total,
            "perf/rollout_seconds": tally.rollout_seconds,
            "perf/reward_seconds": tally.reward_seconds,
        }
        if self.generation.journal is not None:
            metrics["perf/journal_bytes"] = every["journal_bytes"].total
            if "journal_samples" in every:
                metrics["perf/journal_samples"] = every["journal_samples"].mean
        if self.config.reward.overlong_buffer.enable:
            metrics["reward/overlong"] = every["overlong"].mean
        filters = self.config.algorithm.filter_groups.enable
        if filters or self.config.rollout.async_steps:
            metrics["sampling/staleness_mean"] = every["staleness"].mean
            metrics["sampling/staleness_max"] = every["staleness"].high
        if filters and "generated" in every:
            metrics["sampling/reward_mean"] = every["generated"].mean
        return metrics

    def _run_ahead(self, step: int) -> None:
        """Begin the generation of `step`, unless what is carried over fills its batch. Collective."""
        data, drawn = self.config.data, None
        if self.config.algorithm.filter_groups.enable:
            if len(self._uids(self._carried)) >= data.train_batch_size:
                return
            drawn = data.gen_batch_size or data.train_batch_size
        position = self.prompts.position
        self._ahead.begin(step, *self.prompts.next(drawn), position)

    def _sample(self, step: int, tally: RolloutStats) -> list[Group]:
        """This rank's share of the groups of the next prompts, whatever their rewards."""
        if (ahead := self._ahead.take(tally)) is not None:
            held, wanted = self._uids(ahead), self.config.data.train_batch_size
            if len(held) == wanted:
                return self._share(ahead, dict(sorted(held.items())))
            log.warning(
                "Left out %d prompts with their samples that the checkpoint kept for step %d: data.train_batch_size is now %d.",
                len(held),
                step,
                wanted,
            )
        return self.generation.groups(step, *self.prompts.next(), tally)

    def _sample_dynamically(self, step: int, tally: RolloutStats) -> tuple[list[Group], dict[str, float]]:
        """This rank's share of a full batch of groups with signal, and how it came about. Every rank takes the same decisions."""
        settings, data = self.config.algorithm.filter_groups, self.config.data
        wanted, drawn = data.train_batch_size, data.gen_batch_size or data.train_batch_size
        kept, dropped, rounds = self._carried, list[Group](), 0
        fresh = self._ahead.take(tally)
        held = self._uids(kept)
        carried = len(held)
        while fresh is not None or (len(held) < wanted and rounds < settings.max_num_gen_batches):
            rounds += 1
            if fresh is None:
                fresh = self.generation.groups(step, *self.prompts.next(drawn), tally)
            kept = kept + [group for group in fresh if group.has_signal(settings.metric)]
            # No more than a whole batch of them, the newest, can be needed to fill up.
            dropped = (dropped + [group for group in fresh if not group.has_signal(settings.metric)])[-wanted:]
            held, fresh = self._uids(kept), None
        chosen = dict(sorted(held.items())[:wanted])
        missing = wanted - len(chosen)
        if missing:
            spare = self._uids(dropped)
            self._check_limit(step, len(held), len(spare), carried)
            chosen |= dict(sorted(spare.items())[-missing:])
        metrics: dict[str, float] = {
            "sampling/gen_batches": rounds,
            "sampling/groups_generated": rounds * drawn,
            "sampling/groups_dropped": rounds * drawn - (len(held) - carried),
            "sampling/groups_carried": len(held) - (wanted - missing),
            "sampling/groups_filled": missing,
        }
        self._carried = [group for group in kept if group.uid not in chosen]
        return self._share(kept + dropped, dict(sorted(chosen.items()))), metrics

    def _uids(self, groups: list[Group]) -> dict[int, int]:
        """The rank that has each group, by uid, over all ranks."""
        uids = self.coordinator.gather([group.uid for group in groups])
        return {uid: rank for rank, of_rank in enumerate(uids) for uid in of_rank}

    def _check_limit(self, step: int, with_signal: int, without: int, carried: int) -> None:
        settings, data = self.config.algorithm.filter_groups, self.config.data
        wanted, drawn = data.train_batch_size, data.gen_batch_size or data.train_batch_size
        facts = (
            f"Step {step} needs data.train_batch_size={wanted} prompts whose samples differ in "
            f"algorithm.filter_groups.metric={settings.metric}, and has {with_signal} ({carried} of them from earlier steps) after "
            f"algorithm.filter_groups.max_num_gen_batches={settings.max_num_gen_batches} generations of {drawn} prompts"
        )
        if settings.on_limit == "stop":
            raise UserError(
                f"{facts}. Raise max_num_gen_batches, take prompts that the policy neither always nor never solves, or set "
                "algorithm.filter_groups.on_limit=fill to train on prompts without signal, too."
            )
        if with_signal + without < wanted:
            raise UserError(
                f"{facts}; with the {without} others they are still too few to fill the batch. Raise max_num_gen_batches or "
                f"data.gen_batch_size: their product must be at least {wanted}."
            )

    def _share(self, mine: list[Group], chosen: dict[int, int]) -> list[Group]:
        """This rank's part of the `chosen` groups (uid -> rank that has it, in order); only groups that change ranks are sent."""
        mini_size, rank = self.config.actor.ppo_mini_batch_size, self.coordinator.rank
        takers = dict(
            zip(chosen, equal_shares(list(chosen.values()), mini_size, self.coordinator.world_size), strict=True)
        )
        groups = {group.uid: group for group in mine}
        if takers != chosen:
            leaving = [groups[uid] for uid, owner in chosen.items() if owner == rank != takers[uid]]
            groups |= {group.uid: group for part in self.coordinator.gather(leaving) for group in part}
        return [groups[uid] for uid, taker in takers.items() if taker == rank]

    def tensors(self) -> dict[str, Tensor]:
        """This rank's groups for the next step, exactly; empty when there are none. Collective: waits for what is generated ahead."""
        return to_tensors(self._carried) | self._ahead.tensors()

    def load_tensors(self, parts: Sequence[dict[str, Tensor]]) -> None:
        """Hold the groups of several ranks' `tensors`, instead of those that are held now; groups that no longer fit are left out."""
        groups = [group for part in parts for group in from_tensors(part)]
        if groups and not self.config.algorithm.filter_groups.enable:
            log.warning(
                "Left out %d prompts with their samples that dynamic sampling had carried over: algorithm.filter_groups.enable=false.",
                len(groups),
            )
            groups = []
        self._carried = sorted((g for g in groups if self._fits(g)), key=lambda group: group.uid)
        if left_out := len(groups) - len(self._carried) + self._ahead.load_tensors(parts, self._fits):
            log.warning(
                "Left out %d prompts with their samples that the checkpoint kept for the next step: rollout.n or "
                "algorithm.adv_estimator is not what they were generated with.",
                left_out,
            )

    def _fits(self, group: Group) -> bool:
        return (
            len(group.samples) == self.generation.params.n
            and (group.baseline is not None) == self.generation.greedy_baseline
        )


def equal_shares(owners: Sequence[int], mini_batch_size: int, world_size: int) -> list[int]:
    """Which rank trains on each group so that every rank has the same number in each mini-batch.

    Args:
        owners: the rank that has each group; `mini_batch_size` consecutive ones are a mini-batch, a multiple of `world_size`.

    Returns:
        A rank for each group. A rank keeps its first ones; those beyond its share go, in order, to the lowest rank with room.
    """
    takers, share = list(owners), mini_batch_size // world_size
    for start in range(0, len(owners), mini_batch_size):
        room, surplus = [share] * world_size, []
        for place in range(start, start + mini_batch_size):
            if room[owners[place]]:
                room[owners[place]] -= 1
            else:
                surplus.append(place)
        free = (rank for rank in range(world_size) for _ in range(room[rank]))
        for place, rank in zip(surplus, free, strict=True):
            takers[place] = rank
    return takers
