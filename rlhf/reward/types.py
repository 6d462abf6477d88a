"""What goes into a reward and what comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class RewardItem:
    """One sample to judge: the text of the response and what its prompt's row says about the answer."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class RewardResult:
    """The score of a sample, further numbers to log, and whether the verifier ran out of time."""

    score: float
    extra: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False


class Reward(Protocol):
    """Scores samples. `score` keeps the order of its items; `close` ends whatever processes it started."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]: ...

    def close(self) -> None: ...


class RewardError(Exception):
    """A verifier failed on a sample; the message has the sample and the verifier's traceback."""
