"""Collects the batch of each step: turns prompts, rollouts and rewards into tensors and metrics."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from rlhf.batch import RolloutBatch, TokenCounts
from rlhf.config import DataConfig, FilterGroupsConfig, RewardConfig
from rlhf.config.derived import needs_reward_model, prompts_per_generation
from rlhf.experience.collate import collate, collate_masks, mask_width
from rlhf.experience.dynamic_sampling import DynamicSampling, PlainSampling
from rlhf.experience.generation import Generation
from rlhf.experience.groups import Group, from_tensors, to_tensors
from rlhf.experience.journal import combined, digests
from rlhf.experience.metrics import RolloutStats, generation_metrics, slowest, step_metrics
from rlhf.experience.new_prompts import NewPrompts
from rlhf.experience.partial_rollouts import PartialRollouts, partial_metrics
from rlhf.experience.prompt_share import PromptShare
from rlhf.experience.responses import log_timeouts
from rlhf.ranks.phase_clock import largest, memory_use

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    """This rank's part of a collected batch, with metrics and token counts over all ranks."""

    batch: RolloutBatch
    groups: list[Group]
    """The groups of `batch`, sorted by uid. This rank generated all of them."""
    metrics: dict[str, float]
    tokens: TokenCounts
    epochs: float
    """Passes over the data set up to the end of this batch, dropped prompts included."""

    @property
    def uids(self) -> list[int]:
        """Uid of the prompt of each row of `batch`."""
        return [group.uid for group in self.groups for _ in group.rows]


@dataclass
class Collector:
    """Collects the batch of each step, with `DynamicSampling` if `algorithm.filter_groups` is enabled.

    Surplus groups are carried over to the next step, on the rank that generated them, and are part of checkpoints.
    With `rollout.async_steps`, later steps continue unfinished responses (`PartialRollouts`). Servers
    continue these responses while the ranks train. A save ends this generation and includes the responses.
    """

    data: InitVar[DataConfig]
    filter_groups: FilterGroupsConfig
    reward: RewardConfig
    async_steps: int
    max_staleness: int
    """Largest age of a token in steps."""
    prompts: PromptShare
    generation: Generation
    device: torch.device
    ends_with: Callable[[int, float], bool]
    """Returns whether a step is the last, given the epochs so far. The last step begins no background generation."""
    windows: frozenset[int] = frozenset()
    """Sliding windows of the models' layers, in tokens. `step_metrics` counts the tokens beyond each window."""
    _source: NewPrompts | PartialRollouts = field(init=False)
    _sampling: PlainSampling | DynamicSampling = field(init=False)
    # Last step that this process collected, and the hash of the step's batch over all ranks.
    _trained: tuple[int, str] | None = field(default=None, init=False)

    def __post_init__(self, data: DataConfig) -> None:
        if self.async_steps:
            self._source = PartialRollouts(self.prompts, self.generation, self.async_steps, self.max_staleness)
        else:
            self._source = NewPrompts(self.prompts, self.generation)
        self.coordinator = self.generation.coordinator
        if self.filter_groups.enable:
            prompts = prompts_per_generation(data, self.filter_groups)
            self._sampling = DynamicSampling(self.filter_groups, prompts, self.max_staleness, self._source)
        else:
            self._sampling = PlainSampling(self._source)

    def collect(self, step: int) -> Collected:
        """Return the batch of `step`. Collective.

        The policy after `step` - 1 steps draws the new tokens, with noise keyed by `step`. A rank returns the groups
        that it generated, possibly none.

        Raises:
            UserError: dynamic sampling cannot fill the batch, or the rewards or environments failed on too many
                samples.
        """
        generation = self.generation
        sampler, journal = generation.sampler, generation.journal
        stats, generated_before = RolloutStats(), sampler.seconds
        if journal is not None:
            before = self._trained[1] if self._trained is not None and self._trained[0] == step - 1 else None
            journal.begin(step, step - 1, before)
        groups, metrics = self._sampling.sample(step, stats)
        sampler.sleep()
        if journal is not None:
            self._trained = (step, combined(self.coordinator.all_gather(digests(groups))))
        batch = collate(groups, generation.tokenizer.pad_token_id, step - 1, self.device)
        longest = generation.params.max_tokens
        batch_metrics, tokens = step_metrics(batch, groups, longest, self.coordinator, self.windows)
        own_seconds = sampler.seconds - generated_before
        if not needs_reward_model(self.reward):  # with a reward model, the seconds include waits for other ranks
            own_seconds += stats.reward_seconds
        is_stale = any(group.version < step - 1 for group in groups)
        gathered = self.coordinator.all_gather((own_seconds, is_stale, memory_use(self.device), mask_width(groups)))
        seconds, stale, memory, widths = zip(*gathered, strict=True)
        metrics |= slowest(seconds) | largest(memory) | sampler.metrics()
        if not any(stale):
            batch.staleness = None
        batch.sampling_mask = collate_masks(groups, max(widths), batch)
        log_timeouts(f"Step {step}", stats.slow, self.coordinator)
        epochs = self._source.epochs()
        metrics["data/epoch"] = int(epochs)
        metrics |= generation_metrics(
            groups,
            stats,
            self.coordinator,
            version=step - 1,
            journal_bytes=None if journal is None else journal.written,
            overlong=self.reward.overlong_buffer.enable,
            staleness=self.filter_groups.enable or bool(self.async_steps),
            generated=self.filter_groups.enable,
        )
        if isinstance(self._source, PartialRollouts):
            metrics |= partial_metrics(self._source, groups, self.coordinator, version=step - 1)
        if not self.ends_with(step, epochs):
            self._source.begin(stats, step)
        return Collected(batch, groups, batch_metrics | metrics, tokens, epochs)

    def drop_journal(self, up_to: int) -> None:
        """Remove the journal files of steps up to `up_to` that a published checkpoint covers."""
        if (journal := self.generation.journal) is not None:
            journal.drop_published(up_to)

    def skip_to(self, position: int | None) -> None:
        """Skip prompts before the uid `position`, and drop carried groups and prompts in flight; None does nothing."""
        if position is not None:
            self._source.drop()
            self.prompts.advance_to(position)
            self._sampling.carry([])

    def invalidate_policy(self) -> None:
        """Drop the responses in flight, and sync the weights before the next generation. Collective.

        Called in a rollback, which changes the weights.
        """
        self._source.drop()
        self.generation.sampler.invalidate_weights()

    @property
    def position(self) -> int:
        """Uid of the first prompt not drawn yet."""
        return self._source.position

    def tensors(self) -> dict[str, Tensor]:
        """End the background generation. Return this rank's groups and samples for later steps. Collective."""
        return to_tensors(self._sampling.carried) | self._source.tensors()

    def load_tensors(self, parts: Sequence[dict[str, Tensor]]) -> None:
        """Replace this rank's carried groups and prompts in flight by those in `parts`, each one rank's `tensors`.

        Drop groups and prompts that do not fit the current settings, and log a warning.
        """
        groups = [group for part in parts for group in from_tensors(part)]
        fitting = [group for group in groups if self.generation.fits(group)]
        self._sampling.carry(fitting)
        if left_out := len(groups) - len(fitting) + self._source.load_tensors(parts):
            log.warning(
                "Dropped %d prompts of the checkpoint, with samples generated for later steps: rollout.n, "
                "rollout.async_steps, data.max_response_length or algorithm.adv_estimator has changed since the save.",
                left_out,
            )
