"""Interface of the rollout engines: requests, sampling parameters, and the protocols that every engine follows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from rlhf.rollout.sample import Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Weights = Callable[[], Iterable[tuple[str, "Tensor"]]]
"""The policy's weights, whole and one by one, each time it is called; every rank walks them to their end."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling; the fields mean what they mean in the `rollout` settings."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Request:
    """Asks for response number `sample` to the prompt `uid`, whose tokens are `token_ids`.

    Noise is keyed by `uid` and `sample`. Consecutive requests for consecutive responses to one prompt are siblings: an
    engine may prefill their prompt once.
    """

    uid: int
    token_ids: list[int]
    params: SamplingParams = SamplingParams()
    sample: int = 0

    def continued_by(self, other: "Request") -> bool:
        """Whether `other` asks for the next response to the same prompt."""
        same = (self.uid, self.sample + 1, self.params) == (other.uid, other.sample, other.params)
        return same and self.token_ids == other.token_ids


def siblings(requests: Sequence[Request]) -> list[range]:
    """The places of the requests, those of siblings together."""
    starts = [i for i in range(len(requests)) if i == 0 or not requests[i - 1].continued_by(requests[i])]
    return [range(start, end) for start, end in pairwise([*starts, len(requests)])]


def places_by_params(requests: Sequence[Request]) -> dict[SamplingParams, list[int]]:
    """The places of the requests with the same parameters, for engines that decode only such ones together."""
    places: dict[SamplingParams, list[int]] = {}
    for place, request in enumerate(requests):
        places.setdefault(request.params, []).append(place)
    return places


class RolloutEngine(Protocol):
    """Turns prompts into samples with the weights it was last given. All calls are collective."""

    @property
    def dtype(self) -> "torch.dtype":
        """Precision of the weights that it takes, on every rank alike; wider ones would be cast."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """Take over the policy's weights; `version` is the step they belong to.

        An engine may ask for them again until the next update.
        """

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        """The sample that each of this rank's requests asks for, in their order."""

    def sleep(self) -> bool:
        """Give back what memory of the device it can until it is next called. Whether the weights went with it."""

    def metrics(self) -> dict[str, float]:
        """Figures since the last call, on the leader; of engines that can fail, what happened to them."""

    def close(self) -> None:
        """End whatever the engine has started."""


class BackgroundEngine(RolloutEngine, Protocol):
    """An engine with devices of its own, which can generate while the rank trains. All calls are collective."""

    def begin(self, requests: Sequence[Request], *, seed: int, step: int) -> None:
        """Start to generate, with the weights as they are now; no other call but `finish` may follow."""

    def finish(self, version: int) -> list[Sample]:
        """Wait for what `begin` started: the sample of each request.

        What could not be generated then (an engine died) is generated now, by the policy as it is by now, after
        `version` steps.
        """


class AdapterEngine(RolloutEngine, Protocol):
    """An engine that keeps a frozen base and applies adapters beside it. All calls are collective."""

    def update_adapters(self, base: Weights, adapters: Weights, version: int) -> None:
        """Take over adapters, by their names in a checkpoint, and at the first call the base that they are for.

        `version` is the step that the adapters belong to.
        """
