"""Balances a step's samples over the ranks that train on them, and sends per-token values back.

A rank's *rollout batch* has the samples that it generated and scored, in whole groups. Its *training batch* has the
samples of its model passes and updates, balanced so that all ranks finish each mini-batch at about the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
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
from rlhf.rollout.sample import ROW

TRAINING_FIELDS = [field.name for field in fields(Batch)]
"""Fields of a rollout batch that are sent to the training ranks."""
B = TypeVar("B", bound=Batch)
Place = tuple[int, int]
"""Place of a sample: a rank, and the row in the batch of this rank."""


class SampleRoute:
    """Moves tensors of a step's samples from one distribution over the ranks to another.

    Args:
        sources, targets: place of each sample before and after the move, for the samples of all ranks.
        lengths: [samples] int64, tokens of the responses.
        ranks: the data-parallel group.
    """

    def __init__(self, sources: Sequence[Place], targets: Sequence[Place], lengths: Tensor, ranks: RankGroup):
        self._sources, self._targets, self._lengths = sources, targets, lengths
        self._still = sources == targets
        rank, self._ranks = ranks.rank, ranks.size
        samples = range(len(sources))
        # Sort by peer, then by sample, so that sender and receiver agree on the order.
        self._sent = sorted((i for i in samples if sources[i][0] == rank), key=lambda i: targets[i][0])
        self._received = sorted((i for i in samples if targets[i][0] == rank), key=lambda i: sources[i][0])

    def of_samples(self, values: Tensor) -> Tensor:
        """Move one value per sample: [N] of this rank's source samples to [M] of its target samples. Collective."""
        return self._moved(values[:, None], torch.ones_like(self._lengths))[:, 0]

    def of_tokens(self, values: Tensor) -> Tensor:
        """Move values of response tokens, [N, R, ...] to [M, R', ...], zero on padding. No bit changes. Collective."""
        return self._moved(values, self._lengths)

    def of_sequences(self, ids: Tensor, prompts: Tensor) -> Tensor:
        """Move token ids of sequences, [N, L] to [M, L']. `prompts`, [samples], are lengths of prompts. Collective."""
        return self._moved(ids, prompts + self._lengths)

    def _moved(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Move the first `lengths` columns of each row of `values` to its target."""
        if self._still:
            return values
        device = values.device
        sent, received = (lengths[torch.tensor(which, dtype=torch.int64)] for which in (self._sent, self._received))
        rows = torch.tensor([self._sources[i][1] for i in self._sent], dtype=torch.int64, device=device)
        entries = all_to_all(
            values[rows][_inside(sent, values.shape[1]).to(device)],
            self._totals(sent, [self._targets[i][0] for i in self._sent]),
            self._totals(received, [self._sources[i][0] for i in self._received]),
        )
        width = int(received.max()) if len(received) else 0
        result = values.new_zeros(len(received), width, *values.shape[2:])
        result[_inside(received, result.shape[1]).to(device)] = entries
        places = torch.tensor([self._targets[i][1] for i in self._received], dtype=torch.int64)
        return result[places.argsort().to(device)]

    def _totals(self, lengths: Tensor, ranks: list[int]) -> list[int]:
        index = torch.tensor(ranks, dtype=torch.int64)
        return torch.zeros(self._ranks, dtype=torch.int64).index_add(0, index, lengths).tolist()


@dataclass(frozen=True)
class Shuffle:
    """Draws the samples of the mini-batches of each epoch, and balances them over the ranks.

    The samples of a mini-batch depend on (seed, step, epoch), and not on the number of ranks.
    """

    seed: int
    step: int
    mini_batches: int
    ranks: RankGroup
    _prompts: list[int]
    _responses: list[int]
    """Numbers of tokens of all ranks' prompts and responses, in the order of uids."""
    _samples: list[range]
    """The rows of each sample; a sample with forks has several (`Sample.forks`)."""

    def deal(self, epoch: int) -> tuple[list[Place], SampleBalance]:
        """Return the place of every sample in an epoch, and the split of the mini-batches over the ranks."""
        shuffled = [self._samples[i] for i in self._order(epoch)]
        return _deal(self._prompts, self._responses, shuffled, self.mini_batches, self.ranks.size)

    def moved(self, batch: B, epoch: int) -> B:
        """Return this rank's samples of an epoch, from the `batch` of epoch 0 with all its fields. Collective."""
        places = [self.deal(number)[0] for number in (0, epoch)]
        route = SampleRoute(places[0], places[1], torch.tensor(self._responses), self.ranks)
        return replace(batch, **_moved(batch.present(), route, torch.tensor(self._prompts)))

    def _order(self, epoch: int) -> list[int]:
        # The prompt stream uses the same generator, but never these counters.
        bits = np.random.Philox(key=[self.seed, self.step], counter=[0, 0, 0, 1 + epoch])
        return np.argsort(bits.random_raw(len(self._samples)), kind="stable").tolist()


@dataclass(frozen=True)
class TrainingBatches:
    """The training batches of a step, with routes from and to the rollout batches."""

    batch: Batch
    """This rank's training batch of epoch 0: mini-batch by mini-batch, each in the order of uids unless shuffled."""
    balance: SampleBalance
    """The split of each mini-batch over the ranks."""
    shuffle: Shuffle | None
    """Draws the mini-batches of each epoch; None keeps the mini-batches of the first epoch."""
    to_training: SampleRoute
    to_rollout: SampleRoute


@dataclass(frozen=True)
class SampleResharder:
    """Sends each step's samples to ranks so that all ranks train about equally long."""

    mini_batches: int
    """Parts of a step with equally many samples, one optimizer step each: consecutive groups, or shuffled samples."""
    coordinator: Coordinator
    shuffle_seed: int | None = None
    """Seed of the draws of mini-batches; None leaves the samples in order."""

    def reshard(self, rollout: Batch, uids: Sequence[int], step: int) -> TrainingBatches:
        """Send the samples of the rollout batches to the ranks that train on them. Collective.

        The target ranks follow from the lengths of all samples, and do not depend on the source ranks.

        Args:
            rollout: this rank's rollout batch.
            uids: uid of the prompt of each row, ascending. All samples of a prompt are on one rank.
            step: number of the training step, for the shuffle.
        """
        tensors = rollout.prompt_lengths, rollout.response_lengths, rollout.numbers
        facts = list(zip(uids, *(tensor.tolist() for tensor in tensors), strict=True))
        ranks = dims.data()
        of_ranks = ranks.of(self.coordinator.all_gather(facts))
        placed = sorted((fact[0], rank, row) for rank, own in enumerate(of_ranks) for row, fact in enumerate(own))
        sources = [(rank, row) for _, rank, row in placed]
        prompts, responses = ([of_ranks[rank][row][i] for rank, row in sources] for i in (1, 2))
        shuffle, samples = None, _samples([of_ranks[rank][row][3] for rank, row in sources])
        if self.shuffle_seed is not None:
            shuffle = Shuffle(self.shuffle_seed, step, self.mini_batches, ranks, prompts, responses, samples)
            places, plan = shuffle.deal(0)
        else:
            places, plan = _deal(prompts, responses, samples, self.mini_batches, ranks.size)
        to_training = SampleRoute(sources, places, torch.tensor(responses), ranks)
        to_rollout = SampleRoute(places, sources, torch.tensor(responses), ranks)
        moved = {name: value for name, value in rollout.present().items() if name in TRAINING_FIELDS}
        return TrainingBatches(
            Batch(**_moved(moved, to_training, torch.tensor(prompts))), plan, shuffle, to_training, to_rollout
        )


def _deal(
    prompts: Sequence[int], responses: Sequence[int], samples: Sequence[range], mini_batches: int, ranks: int
) -> tuple[list[Place], SampleBalance]:
    """Return the place of each row, and the split of the mini-batches, which are consecutive parts of `samples`."""
    order, rows_of = list(chain.from_iterable(samples)), list(map(len, samples))
    lengths = [prompts[row] + responses[row] for row in order]
    owners = balance_samples(lengths, mini_batches, ranks, rows_of)
    counts, places = [0] * ranks, [(0, 0)] * len(order)
    for row, owner in zip(order, owners, strict=True):
        places[row] = (owner, counts[owner])
        counts[owner] += 1
    return places, SampleBalance.owned(lengths, owners, mini_batches, ranks, rows_of)


def _samples(numbers: Sequence[int]) -> list[range]:
    """Return the rows of each sample, from the numbers of all rows (`Batch.numbers`)."""
    starts = [row for row, number in enumerate(numbers) if number < ROW]
    return [range(*pair) for pair in pairwise([*starts, len(numbers)])]


def _moved(tensors: dict[str, Tensor], route: SampleRoute, prompts: Tensor) -> dict[str, Tensor]:
    """Move the `tensors` of a batch by `route`. `prompts` are the lengths of all prompts. Collective."""
    ids = route.of_sequences(tensors.pop("input_ids"), prompts)
    moved = {name: route.of_tokens(v) if v.dim() > 1 else route.of_samples(v) for name, v in tensors.items()}
    return moved | {"input_ids": ids}


def _inside(lengths: Tensor, width: int) -> Tensor:
    """Return a mask of the first `lengths` columns of each row, [N, width] bool."""
    return torch.arange(width) < lengths[:, None]
