"""What goes into a rollout engine and what comes out of it, the same for every engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; the fields mean what they mean in the `rollout` settings."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt: `uid` names it for the whole run and seeds its noise, `token_ids` is what the model reads."""

    uid: int
    token_ids: list[int]


@dataclass(frozen=True)
class Sample:
    """Response number `sample` to the request `uid`.

    `token_ids` ends with the EOS token if one was produced. `log_probs` has one natural logarithm for each token, under
    the distribution that it was drawn from. `finish_reason` is `stop` for EOS and stop strings, otherwise `length`.
    """

    uid: int
    sample: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason


class RolloutEngine(Protocol):
    """Turns prompts into samples with the weights it was last given."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the policy's weights; `version` is the step they belong to."""
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int) -> list[Sample]:
        """`params.n` samples of each request, in the order of the requests."""
        ...
