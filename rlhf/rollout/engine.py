"""Interface of the rollout engines: requests, sampling parameters, and the protocols that every engine follows."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlhf.rollout.sample import FinishReason, Sample
from rlhf.rollout.sampling_mask import SamplingMask

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Weights = Callable[[], Iterable[tuple[str, "Tensor"]]]
"""Function that yields the policy's weights, unsharded, one by one. Every rank must iterate to the end."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, named as in the `rollout` settings."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    sampling_mask: bool = False


@dataclass(frozen=True)
class Request:
    """Requests response number `sample` to the prompt `uid` with the tokens `token_ids`.

    Noise is keyed by `uid`, `sample` and the position in the response; a later row of an episode has a `sample` of its
    own (`rlhf.rollout.sample.ROW`). Successive requests for successive samples of one prompt are siblings if they have
    equal parameters and no response yet. An engine may prefill the prompt of siblings once.

    With `response`, the response so far, an engine continues after the prompt and the response's tokens. The returned
    sample begins with these tokens, and `params.max_tokens` bounds the whole response. A stop string may begin in the
    response so far, but not before the end of the last observation.
    """

    uid: int
    token_ids: list[int]
    params: SamplingParams = SamplingParams()
    sample: int = 0
    response: Sample | None = None

    @property
    def start(self) -> int:
        """Position in the response of the first token to sample."""
        return 0 if self.response is None else len(self.response)

    @property
    def context(self) -> list[int]:
        """Tokens before the first token to sample: the prompt and the response so far."""
        return self.token_ids if self.response is None else [*self.token_ids, *self.response.token_ids.tolist()]

    @property
    def tokens_left(self) -> int:
        """Largest number of tokens that an engine may sample. Raise ValueError if the response so far is full."""
        if (left := self.params.max_tokens - self.start) > 0:
            return left
        raise ValueError(
            f"sample {self.sample} of prompt {self.uid} has {self.start} tokens already; max_tokens is "
            f"{self.params.max_tokens}"
        )

    @property
    def turn_start(self) -> int:
        """Position in the response after the last observation. Stop strings begin there or later."""
        return self.response.observations[-1][1] if self.response is not None and self.response.observations else 0

    def answered(
        self,
        token_ids: Sequence[int] | np.ndarray,
        log_probs: Sequence[float] | np.ndarray,
        finish_reason: FinishReason,
        version: int,
        sampling_mask: SamplingMask | None = None,
    ) -> Sample:
        """Return the sample: the response so far, and the new tokens of the policy after `version` steps."""
        return self.so_far.extended(token_ids, log_probs, finish_reason, version, sampling_mask)

    @property
    def so_far(self) -> Sample:
        """The response so far, perhaps without a token."""
        return Sample.of(self.uid, self.sample, [], [], "partial") if self.response is None else self.response

    def precedes_sibling(self, other: "Request") -> bool:
        """Return whether `other` asks for the next sample of the same prompt, with equal parameters and no response."""
        same = (self.uid, self.sample + 1, self.params) == (other.uid, other.sample, other.params)
        return same and self.response is other.response is None and self.token_ids == other.token_ids


def siblings(requests: Sequence[Request]) -> list[range]:
    """Return the indices of the requests, one range for each group of siblings."""
    starts = [i for i in range(len(requests)) if i == 0 or not requests[i - 1].precedes_sibling(requests[i])]
    return [range(start, end) for start, end in pairwise([*starts, len(requests)])]


@dataclass(frozen=True)
class Quota:
    """Asks a generation for `groups` complete groups among the groups of the prompts `uids`."""

    uids: frozenset[int]
    groups: int


Listener = Callable[[Sequence[Sample]], None]
"""Function that an engine calls in the thread of the rank with new complete samples, perhaps none, while it generates
other samples."""


class Completion:
    """Counts the complete groups of a generation. A group is complete once all requests of its uid are answered.

    `reached` becomes true once every quota is reached, and stays false without quotas.
    """

    def __init__(self, requests: Iterable[Request], quotas: Sequence[Quota]) -> None:
        self._left = Counter(request.uid for request in requests)
        self._quotas = quotas
        self._missing = [quota.groups for quota in quotas]

    def answered(self, request: Request) -> None:
        self._left[request.uid] -= 1
        if not self._left[request.uid]:
            for i, quota in enumerate(self._quotas):
                self._missing[i] -= request.uid in quota.uids

    def extend(self, requests: Iterable[Request]) -> None:
        """Count further requests."""
        self._left.update(request.uid for request in requests)

    @property
    def reached(self) -> bool:
        return bool(self._quotas) and max(self._missing) <= 0


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
        """Receive the policy's weights. `version` is the number of steps that the policy has done.

        An engine may call `weights` again until the next update.
        """

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        """Return the samples of this rank's requests, in the order of the requests."""

    def listen(self, listener: Listener | None) -> None:
        """Call `listener` with each of this rank's samples that is complete before its generation ends.

        An engine may call the listener late, or never (the default). Either every rank sets a listener, or none does.
        """
        return

    def sleep(self) -> bool:
        """Release device memory until the next call, if possible. Return whether the weights were released, too."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, on the leader, such as the failures of rollout servers."""
        return {}

    def close(self) -> None:
        """End all processes and threads that the engine has started; by default none."""
        return


class PartialEngine(RolloutEngine, Protocol):
    """An engine that can return before all samples are complete. All calls are collective."""

    def generate_until(
        self, requests: Sequence[Request], quotas: Sequence[Quota], *, seed: int, step: int
    ) -> list[Sample]:
        """Return a sample for each of this rank's requests as soon as every quota is reached.

        A group is complete once all requests of its uid are answered. Unfinished samples have the finish reason
        `partial` and the tokens so far, perhaps none. Which groups are complete depends only on the requests and the
        tokens, never on the clock, except with a `BackgroundEngine`.
        """


class BackgroundEngine(PartialEngine, Protocol):
    """An engine with devices of its own, which can generate while the rank trains. All calls are collective.

    After `generate_until`, the engine continues the partial samples with the same weights. Until `stop`, only `metrics`
    and `sleep` may be called, and after `begin` also `exchange`.
    """

    def begin(self, requests: Sequence[Request], *, seed: int, step: int) -> None:
        """Start to generate with the current weights, until `stop`."""

    def exchange(self, requests: Sequence[Request], *, wait: bool) -> list[Sample]:
        """Add requests to the generation of `begin`; return this rank's samples that are complete since the last call.

        `wait`, the same on every rank: wait a little for such samples. `stop` does not return the samples of requests
        that this method added.
        """

    def stop(self) -> list[Sample]:
        """End the generation of `begin` or `generate_until`, and return the sample of each request.

        An unfinished sample is partial and has the tokens so far.
        """


class AdapterEngine(RolloutEngine, Protocol):
    """An engine that keeps the frozen base weights and applies adapters to them. All calls are collective."""

    def update_adapters(self, base: Weights, adapters: Weights, version: int) -> None:
        """Receive adapters, by their names in a checkpoint, and at the first call the base weights.

        `version` is the number of steps that the policy has done.
        """
