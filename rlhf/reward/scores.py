"""Items and scores: the input and the output of rewards, and the interface of one function."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

NUMBER = "number"
"""Field that a question to a reward process has in common with its answer, and with no other."""

_SHOWN = ("data_source", "response", "ground_truth", "extra_info", "messages", "columns")
_LONGEST = 1000
"""Fields of a sample that a message has, and the characters of each."""


@dataclass(frozen=True)
class RewardItem:
    """One sample to judge: the response, its prompt's chat, and what the prompt's row says about the answer."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    """The prompt as a chat."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns of the row that functions read, with the prompt as the data have it as `prompt`."""
    token_ids: Sequence[int] | np.ndarray = ()
    """Of the response; a list where a function reads them."""
    group: int = 0
    """Number of its prompt among those that are scored together."""

    def __str__(self) -> str:
        return ", ".join(f"{name}={_cut(getattr(self, name))}" for name in _SHOWN if getattr(self, name) != {})


@dataclass(frozen=True)
class Score:
    """Score of one sample by one function, None where it has none to give; `extra` are further numbers to log."""

    score: float | None
    extra: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    """What else the function says of it, as JSON has it: for people."""
    timed_out: bool = False
    failed: bool = False


@dataclass(frozen=True)
class RewardResult:
    """The reward of a sample: what all functions say of it together."""

    score: float
    """The weighted sum of `terms`."""
    terms: dict[str, float]
    """Own score, unweighted, of each function that gave one, by its label, in the order of `reward.functions`."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers to log."""
    timeouts: int = 0
    """How many functions ran out of time on it."""
    failures: int = 0
    """How many functions failed on it."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Texts, lists and the like for people to read."""

    @property
    def correct(self) -> bool:
        """Whether the first function that has given a score gave at least 1."""
        return next(iter(self.terms.values())) >= 1


class Scorer(Protocol):
    """One function. `score` keeps the order of its items; `close` ends whatever processes it started."""

    def score(self, items: Sequence[RewardItem]) -> list[Score]: ...

    def close(self) -> None: ...


class RewardError(Exception):
    """A function failed on a sample, or its process did; the message has the sample and the function's traceback."""


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
