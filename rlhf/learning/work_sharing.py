"""Work of a step: its samples on the ranks that train on them, and the way of figures between there and home."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf.batch import Batch
from rlhf.learning.spread import Spread, spread
from rlhf.ranks import dims
from rlhf.ranks.collectives import all_to_all
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.dims import RankGroup

WORKED_ON = [field.name for field in fields(Batch)]
"""Fields of a home batch that go to the rank that trains on a sample."""
B = TypeVar("B", bound=Batch)
Place = tuple[int, int]
"""A rank, and a row of its batch."""


class SampleRoute:
    """Way of a step's samples from the places that they have in one batch over all ranks to those of another.

    Args:
        sources, targets: the places of each sample, known on every rank.
        lengths: of the responses, in tokens.
        ranks: those that hold different samples.
    """

    def __init__(self, sources: Sequence[Place], targets: Sequence[Place], lengths: Tensor, ranks: RankGroup):
        self._sources, self._targets, self._lengths = sources, targets, lengths
        self._still = sources == targets
        rank, self._ranks = ranks.rank, ranks.size
        every = range(len(sources))
        # By rank at the other end, and in the order of the samples for each: the same order on both sides.
        self._sent = sorted((i for i in every if sources[i][0] == rank), key=lambda i: targets[i][0])
        self._came = sorted((i for i in every if targets[i][0] == rank), key=lambda i: sources[i][0])

    def of_samples(self, values: Tensor) -> Tensor:
        """[N] of the samples here as [M] of those that come, bit for bit. Collective."""
        return self._moved(values[:, None], torch.ones_like(self._lengths))[:, 0]

    def of_tokens(self, values: Tensor) -> Tensor:
        """[N, R] of the response tokens here as [M, R'] of those that come, bit for bit, zero on padding.
        Collective."""
        return self._moved(values, self._lengths)

    def of_sequences(self, ids: Tensor, prompts: Tensor) -> Tensor:
        """Token ids of whole sequences, [N, L] as [M, L']; `prompts` are the lengths of the prompts of all samples.
        Collective."""
        return self._moved(ids, prompts + self._lengths)

    def _moved(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Rows of `values`, of which the first `lengths` count, at their targets."""
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
        """Entries to or from each rank."""
        index = torch.tensor(ranks, dtype=torch.int64)
        return torch.zeros(self._ranks, dtype=torch.int64).index_add(0, index, lengths).tolist()


@dataclass(frozen=True)
class Shuffle:
    """Mini-batches of a step that are drawn anew for each epoch, sample by sample: a pure function of (seed, step,
    epoch) and the samples' lengths, however many ranks there are. Each draw is spread over the ranks as evenly as any
    other."""

    seed: int
    step: int
    mini_batches: int
    ranks: RankGroup
    _prompts: list[int]
    _responses: list[int]
    """Tokens of every rank's samples in the order of uids."""

    def deal(self, epoch: int) -> tuple[list[Place], Spread]:
        """The place of every sample in an epoch, and how many each rank has of each mini-batch."""
        return _deal(self._prompts, self._responses, self._order(epoch), self.mini_batches, self.ranks.size)

    def moved(self, batch: B, epoch: int) -> B:
        """This rank's samples of an epoch from the `batch` of epoch 0, with everything that it has. Collective."""
        places = [self.deal(number)[0] for number in (0, epoch)]
        route = SampleRoute(places[0], places[1], torch.tensor(self._responses), self.ranks)
        return replace(batch, **_moved(batch.present(), route, torch.tensor(self._prompts)))

    def _order(self, epoch: int) -> list[int]:
        # As the order of the prompts is drawn, by other counters than those.
        bits = np.random.Philox(key=[self.seed, self.step], counter=[0, 0, 0, 1 + epoch])
        return np.argsort(bits.random_raw(len(self._prompts)), kind="stable").tolist()


@dataclass(frozen=True)
class SharedWork:
    """A step's samples as the ranks train on them.

    A sample's home is the rank that has its group, where it is scored and compared with the group's others. Its work
    may be on another: the samples of each mini-batch are spread so that all ranks have about the same to do.
    """

    batch: Batch
    """This rank's samples, mini-batch after mini-batch; of each in the order of uids unless it is shuffled."""
    spread: Spread
    """How many every rank has of each mini-batch, and their lengths."""
    shuffle: Shuffle | None
    """Draws the mini-batches of each epoch; `batch` is that of epoch 0."""
    _there: SampleRoute
    _back: SampleRoute

    def bring_home(self, values: Tensor) -> Tensor:
        """Values of the response tokens of `batch`, [N, R], as [M, R'] of the home batch. Collective."""
        return self._back.of_tokens(values)

    def take_along(self, values: Tensor) -> Tensor:
        """Values of the response tokens of the home batch, [M, R'], as [N, R] of `batch`. Collective."""
        return self._there.of_tokens(values)


@dataclass(frozen=True)
class WorkSharing:
    """Spreads each step's samples over the ranks."""

    mini_batches: int
    """Parts of a step with equally many samples, one optimizer step each: consecutive groups in the order of uids, or
    shuffled."""
    coordinator: Coordinator
    shuffle_seed: int | None = None
    """Draws the mini-batches of each epoch; None leaves them in order."""

    def share(self, home: Batch, uids: Sequence[int], step: int) -> SharedWork:
        """The work of a step whose samples lie in the `home` batches. Collective.

        Which rank works on a sample follows from the lengths of all, whatever their homes.

        Args:
            uids: of the prompt of each row, ascending; each is on one rank.
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
) -> tuple[list[Place], Spread]:
    """The place of each sample, when they come in that `order`, and the spread of them; `prompts` and `responses` are
    their tokens."""
    lengths = [prompts[sample] + responses[sample] for sample in order]
    owners = spread(lengths, mini_batches, ranks)
    counts, places = [0] * ranks, [(0, 0)] * len(order)
    for sample, owner in zip(order, owners, strict=True):
        places[sample] = (owner, counts[owner])
        counts[owner] += 1
    return places, Spread.owned(lengths, owners, mini_batches, ranks)


def _moved(tensors: dict[str, Tensor], route: SampleRoute, prompts: Tensor) -> dict[str, Tensor]:
    """The tensors of a batch for the samples that come here; `prompts` are the lengths of all samples' prompts."""
    ids = route.of_sequences(tensors.pop("input_ids"), prompts)
    moved = {name: route.of_tokens(v) if v.dim() == 2 else route.of_samples(v) for name, v in tensors.items()}
    return moved | {"input_ids": ids}


def _inside(lengths: Tensor, width: int) -> Tensor:
    """[N, width] bool: the first `lengths` columns of each row."""
    return torch.arange(width) < lengths[:, None]
