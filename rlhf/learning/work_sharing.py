"""Sends a step's samples to the ranks that train on them, and per-token values between those ranks and home.

A sample's *home* is the rank that generated and scored it, with its group. Its *work* is on the rank that computes the
model passes and updates. The two differ so that all ranks have about equal work in each mini-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf.batch import Batch
from rlhf.learning.balancing import SampleBalance, balance_samples
from rlhf.ranks import dims
from rlhf.ranks.collectives import all_to_all
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.dims import RankGroup

WORKED_ON = [field.name for field in fields(Batch)]
"""Fields of a home batch that are sent to the rank that trains on a sample."""
B = TypeVar("B", bound=Batch)
Place = tuple[int, int]
"""Rank, and row of that rank's batch."""


class SampleRoute:
    """Moves tensors of a step's samples from one distribution over the ranks to another.

    Args:
        sources, targets: place of each sample before and after, the same lists on every rank.
        lengths: [samples] int64, tokens of the responses.
        ranks: the data-parallel group.
    """

    def __init__(self, sources: Sequence[Place], targets: Sequence[Place], lengths: Tensor, ranks: RankGroup):
        self._sources, self._targets, self._lengths = sources, targets, lengths
        self._still = sources == targets
        rank, self._ranks = ranks.rank, ranks.size
        every = range(len(sources))
        # Sorted by the other rank, then in the order of samples, so that sender and receiver agree.
        self._sent = sorted((i for i in every if sources[i][0] == rank), key=lambda i: targets[i][0])
        self._came = sorted((i for i in every if targets[i][0] == rank), key=lambda i: sources[i][0])

    def of_samples(self, values: Tensor) -> Tensor:
        """Move one value per sample: [N] of this rank's source samples to [M] of its target samples. Collective."""
        return self._moved(values[:, None], torch.ones_like(self._lengths))[:, 0]

    def of_tokens(self, values: Tensor) -> Tensor:
        """Move values of response tokens, [N, R] to [M, R'], zero on padding. No bit changes. Collective."""
        return self._moved(values, self._lengths)

    def of_sequences(self, ids: Tensor, prompts: Tensor) -> Tensor:
        """Move token ids of whole sequences, [N, L] to [M, L']. Collective.

        Args:
            prompts: [samples] int64, tokens of the prompts of all samples.
        """
        return self._moved(ids, prompts + self._lengths)

    def _moved(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Move rows of `values` to their targets. The first `lengths` columns of a row count."""
        if self._still:
            return values
        device = values.device
        sent, came = (lengths[torch.tensor(which, dtype=torch.int64)] for which in (self._sent, self._came))
        rows = torch.tensor([self._sources[i][1] for i in self._sent], dtype=torch.int64, device=device)
        received = all_to_all(
            values[rows][_inside(sent, values.shape[1]).to(device)],
            self._totals(sent, [self._targets[i][0] for i in self._sent]),
            self._totals(came, [self._sources[i][0] for i in self._came]),
        )
        result = values.new_zeros(len(came), int(came.max()) if len(came) else 0)
        result[_inside(came, result.shape[1]).to(device)] = received
        places = torch.tensor([self._targets[i][1] for i in self._came], dtype=torch.int64)
        return result[places.argsort().to(device)]

    def _totals(self, lengths: Tensor, ranks: list[int]) -> list[int]:
        """Return the number of entries for each rank."""
        index = torch.tensor(ranks, dtype=torch.int64)
        return torch.zeros(self._ranks, dtype=torch.int64).index_add(0, index, lengths).tolist()


@dataclass(frozen=True)
class Shuffle:
    """Draws the mini-batches of a step anew for each epoch, sample by sample, and balances each over the ranks.

    Which samples are in a mini-batch follows from (seed, step, epoch), whatever the number of ranks.
    """

    seed: int
    step: int
    mini_batches: int
    ranks: RankGroup
    _prompts: list[int]
    _responses: list[int]
    """Tokens of the prompts and responses of all ranks' samples, in the order of uids."""

    def deal(self, epoch: int) -> tuple[list[Place], SampleBalance]:
        """Return the place of every sample in an epoch, and how the mini-batches are split over the ranks."""
        return _deal(self._prompts, self._responses, self._order(epoch), self.mini_batches, self.ranks.size)

    def moved(self, batch: B, epoch: int) -> B:
        """Return this rank's samples of an epoch, from the `batch` of epoch 0 with all its fields. Collective."""
        places = [self.deal(number)[0] for number in (0, epoch)]
        route = SampleRoute(places[0], places[1], torch.tensor(self._responses), self.ranks)
        return replace(batch, **_moved(batch.present(), route, torch.tensor(self._prompts)))

    def _order(self, epoch: int) -> list[int]:
        # The same generator as for the order of prompts, with counters that the latter does not use.
        bits = np.random.Philox(key=[self.seed, self.step], counter=[0, 0, 0, 1 + epoch])
        return np.argsort(bits.random_raw(len(self._prompts)), kind="stable").tolist()


@dataclass(frozen=True)
class SharedWork:
    """A step's samples on the ranks that train on them, and the way back to their homes."""

    batch: Batch
    """This rank's samples, one mini-batch after the other; within each in the order of uids unless shuffled."""
    balance: SampleBalance
    """How the samples of each mini-batch are split over the ranks."""
    shuffle: Shuffle | None
    """Draws the mini-batches of each epoch; None keeps them. `batch` is that of epoch 0."""
    _there: SampleRoute
    _back: SampleRoute

    def to_rollout_ranks(self, values: Tensor) -> Tensor:
        """Send values of the response tokens of `batch`, [N, R], home: as [M, R'] of the home batch. Collective."""
        return self._back.of_tokens(values)

    def take_along(self, values: Tensor) -> Tensor:
        """Send values of the home batch's response tokens, [M, R'], to work: as [N, R] of `batch`. Collective."""
        return self._there.of_tokens(values)


@dataclass(frozen=True)
class WorkSharing:
    """Balances each step's samples over the ranks."""

    mini_batches: int
    """Number of parts of a step with equally many samples, one optimizer step each: consecutive groups in the order of
    uids, or shuffled samples."""
    coordinator: Coordinator
    shuffle_seed: int | None = None
    """Seed with which the mini-batches of each epoch are drawn; None leaves the samples in order."""

    def share(self, home: Batch, uids: Sequence[int], step: int) -> SharedWork:
        """Send the samples of the `home` batches to the ranks that train on them. Collective.

        The rank follows from the lengths of all samples, and does not depend on their homes.

        Args:
            home: this rank's samples.
            uids: uid of the prompt of each row, ascending. All samples of a prompt are on one rank.
            step: number of the training step, for the shuffle.
        """
        facts = list(zip(uids, home.prompt_lengths.tolist(), home.response_lengths.tolist(), strict=True))
        ranks = dims.data()
        every = ranks.of(self.coordinator.gather(facts))
        placed = sorted((fact[0], rank, row) for rank, of_rank in enumerate(every) for row, fact in enumerate(of_rank))
        homes = [(rank, row) for _, rank, row in placed]
        prompts, responses = ([every[rank][row][i] for rank, row in homes] for i in (1, 2))
        shuffle = None
        if self.shuffle_seed is not None:
            shuffle = Shuffle(self.shuffle_seed, step, self.mini_batches, ranks, prompts, responses)
            places, plan = shuffle.deal(0)
        else:
            in_order = range(len(prompts))
            places, plan = _deal(prompts, responses, in_order, self.mini_batches, ranks.size)
        there = SampleRoute(homes, places, torch.tensor(responses), ranks)
        back = SampleRoute(places, homes, torch.tensor(responses), ranks)
        tensors = {name: value for name, value in home.present().items() if name in WORKED_ON}
        return SharedWork(Batch(**_moved(tensors, there, torch.tensor(prompts))), plan, shuffle, there, back)


def _deal(
    prompts: Sequence[int], responses: Sequence[int], order: Sequence[int], mini_batches: int, ranks: int
) -> tuple[list[Place], SampleBalance]:
    """Return the place of each sample, and how the mini-batches are split over the ranks.

    Args:
        prompts, responses: tokens of each sample.
        order: the samples in the order in which mini-batches are cut from them.
    """
    lengths = [prompts[sample] + responses[sample] for sample in order]
    owners = balance_samples(lengths, mini_batches, ranks)
    counts, places = [0] * ranks, [(0, 0)] * len(order)
    for sample, owner in zip(order, owners, strict=True):
        places[sample] = (owner, counts[owner])
        counts[owner] += 1
    return places, SampleBalance.owned(lengths, owners, mini_batches, ranks)


def _moved(tensors: dict[str, Tensor], route: SampleRoute, prompts: Tensor) -> dict[str, Tensor]:
    """Move the `tensors` of a batch by `route`. `prompts` are the tokens of all samples' prompts. Collective."""
    ids = route.of_sequences(tensors.pop("input_ids"), prompts)
    moved = {name: route.of_tokens(v) if v.dim() == 2 else route.of_samples(v) for name, v in tensors.items()}
    return moved | {"input_ids": ids}


def _inside(lengths: Tensor, width: int) -> Tensor:
    """Return a mask, [N, width] bool, of the first `lengths` columns of each row."""
    return torch.arange(width) < lengths[:, None]
