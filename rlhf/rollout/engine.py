"""Interface of the rollout engines: requests, samples, and the protocols that every engine follows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length"]
Weights = Callable[[], Iterable[tuple[str, "Tensor"]]]
"""The policy's weights, whole and one by one, each time it is called; every rank walks them to their end."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling; the fields mean what they mean in the `rollout` settings."""

    n: int = 1
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
    """A prompt and how to sample it: `uid` names it for the run and seeds its noise, the model reads `token_ids`."""

    uid: int
    token_ids: list[int]
    params: SamplingParams = SamplingParams()


@dataclass(frozen=True)
class Sample:
    """Response number `sample` to the request `uid`.

    `token_ids` ends with the EOS token if one was produced. `log_probs` has one natural logarithm for each token, under
    the distribution that it was drawn from. `finish_reason` is `stop` for EOS and stop strings, otherwise `length`.
    `version`: the steps that the policy had done; it is each token's, since weights never change within a sample.
    `observations` are the spans [start, end) of `token_ids` that a tool or an environment wrote, in order; all else the
    policy wrote. What `log_probs` says of them is never read.
    """

    uid: int
    sample: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    version: int = 0
    observations: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        bounds = [0, *(bound for span in self.observations for bound in span), len(self.token_ids)]
        if bounds != sorted(bounds):
            raise ValueError(f"observations {self.observations} are not spans of {len(self.token_ids)} tokens in order")

    @property
    def written(self) -> int:
        """Number of tokens that the policy wrote."""
        return len(self.token_ids) - sum(end - start for start, end in self.observations)


def as_spans(pairs: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """`Sample.observations` from the lists as which JSON and tensors hand them back."""
    return tuple((start, end) for start, end in pairs)


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

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[list[Sample]]:
        """For each of this rank's requests, in their order, its `params.n` samples."""

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

    def finish(self, version: int) -> list[list[Sample]]:
        """Wait for what `begin` started: the samples of each request.

        What could not be generated then (an engine died) is generated now, by the policy as it is by now, after
        `version` steps.
        """


class AdapterEngine(RolloutEngine, Protocol):
    """An engine that keeps a frozen base and applies adapters beside it. All calls are collective."""

    def update_adapters(self, base: Weights, adapters: Weights, version: int) -> None:
        """Take over adapters, by their names in a checkpoint, and at the first call the base that they are for.

        `version` is the step that the adapters belong to.
        """
