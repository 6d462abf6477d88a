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
"""Function that yields the policy's weights, unsharded, one by one. Every rank must iterate to the end."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, as in the settings `rollout`."""

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
    """Requests response number `sample` to the prompt `uid` with the tokens `token_ids`.

    Noise is keyed by `uid` and `sample`. Successive requests for successive samples of one prompt are siblings. An
    engine may prefill the prompt of siblings once.
    """

    uid: int
    token_ids: list[int]
    params: SamplingParams = SamplingParams()
    sample: int = 0

    def continued_by(self, other: "Request") -> bool:
        """Return whether `other` is the request for the next sample of the same prompt."""
        same = (self.uid, self.sample + 1, self.params) == (other.uid, other.sample, other.params)
        return same and self.token_ids == other.token_ids


def siblings(requests: Sequence[Request]) -> list[range]:
    """Return the indices of the requests, one range for each group of siblings."""
    starts = [i for i in range(len(requests)) if i == 0 or not requests[i - 1].continued_by(requests[i])]
    return [range(start, end) for start, end in pairwise([*starts, len(requests)])]


def indices_by_params(requests: Sequence[Request]) -> dict[SamplingParams, list[int]]:
    """Group the indices of the requests by parameters, for engines that decode only equal parameters together."""
    indices: dict[SamplingParams, list[int]] = {}
    for i, request in enumerate(requests):
        indices.setdefault(request.params, []).append(i)
    return indices


class RolloutEngine(Protocol):
    """Turns prompts into samples with the weights of the last sync. All calls are collective."""

    @property
    def dtype(self) -> "torch.dtype":
        """Precision of the engine's weights, the same on every rank. The engine casts weights of another precision."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """Receive the policy's weights. `version` is the number of steps that the policy has done. An engine may call
        `weights` again until the next update."""

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        """Return the samples of this rank's requests, in the order of the requests."""

    def sleep(self) -> bool:
        """Release device memory until the next call, if possible. Return whether the weights were released, too."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, on the leader, such as the failures of rollout servers."""
        return {}

    def close(self) -> None:
        """End all processes and threads that the engine has started; by default none."""
        return


class BackgroundEngine(RolloutEngine, Protocol):
    """An engine with devices of its own, which can generate while the rank trains. All calls are collective."""

    def begin(self, requests: Sequence[Request], *, seed: int, step: int) -> None:
        """Start to generate with the current weights. Only `finish` may be called next."""

    def finish(self, version: int) -> list[Sample]:
        """Wait for the generation of `begin`, and return the sample of each request. Requests that failed because an
        engine died are generated now, by the current policy, after `version` steps."""


class AdapterEngine(RolloutEngine, Protocol):
    """An engine that keeps the frozen base weights and applies adapters to them. All calls are collective."""

    def update_adapters(self, base: Weights, adapters: Weights, version: int) -> None:
        """Receive adapters, by their names in a checkpoint, and at the first call the base weights. `version` is the
        number of steps that the policy has done."""
