"""Items and scores: the input and the output of rewards, and the interface of one function."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

NUMBER = "number"
"""Field that a question to a reward process has in common with its answer, and with no other."""

_SHOWN = 1000
"""Characters of each field of a sample that a message has."""


@dataclass(frozen=True)
class RewardItem:
    """One sample to judge: the response, its prompt's chat, and what the prompt's row says about the answer."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, str]]
    """The prompt as a chat; a reward model reads it, functions don't get it."""

    def __str__(self) -> str:
        return ", ".join(f"{each.name}={_cut(getattr(self, each.name))}" for each in fields(self))


@dataclass(frozen=True)
class Score:
    """Score of one sample by one function; `extra` are further numbers to log."""

    score: float
    extra: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False
    failed: bool = False


@dataclass(frozen=True)
class RewardResult:
    """The reward of a sample: what all functions say of it together."""

    score: float
    """The weighted sum of `terms`."""
    terms: dict[str, float]
    """Each function's own score by its label, unweighted, in the order of `reward.functions`."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers to log."""
    timeouts: int = 0
    """How many functions ran out of time on it."""
    failures: int = 0
    """How many functions failed on it."""

    @property
    def correct(self) -> bool:
        """Whether the first function gives at least 1."""
        return next(iter(self.terms.values())) >= 1


class Scorer(Protocol):
    """One function. `score` keeps the order of its items; `close` ends whatever processes it started."""

    def score(self, items: Sequence[RewardItem]) -> list[Score]: ...

    def close(self) -> None: ...


class RewardError(Exception):
    """A function failed on a sample, or its process did; the message has the sample and the function's traceback."""


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
