"""Defines the input and the output of rewards, and the interface of one reward function."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

NUMBER = "number"
"""Field with the number of a request. The reply has the same number."""

_SHOWN = ("data_source", "response", "ground_truth", "extra_info", "messages", "columns")
_LONGEST = 1000
"""Error messages show these fields of a sample, each up to this many characters."""


@dataclass(frozen=True)
class RewardItem:
    """One sample to score: the response, its prompt's messages, and fields of the prompt's row."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns of the row that functions read; `prompt` has the prompt as in the data."""
    token_ids: Sequence[int] | np.ndarray = ()
    """Token ids of the response: an array on the ranks, a list in reward processes."""
    group: int = 0
    """Index of the sample's prompt among the prompts that are scored together."""
    conversation: list[dict[str, Any]] = field(default_factory=list)
    """Messages of an episode after the prompt: the policy's turns and the environment's answers."""

    @property
    def answer(self) -> str:
        """The text with the answer: the policy's last turn of an episode, otherwise the response."""
        turns = [message for message in self.conversation if message["role"] == "assistant"]
        return str(turns[-1].get("content") or "") if turns else self.response

    def __str__(self) -> str:
        return ", ".join(f"{name}={_cut(getattr(self, name))}" for name in _SHOWN if getattr(self, name) != {})


@dataclass(frozen=True)
class Score:
    """Result of one function for one sample; `score` is None if the function abstains, `extra` are numbers to log."""

    score: float | None
    extra: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    """Further values that the function returned, as JSON. Users see them in the samples; they are not metrics."""
    timed_out: bool = False
    failed: bool = False


@dataclass(frozen=True)
class RewardResult:
    """The reward of a sample, from all functions."""

    score: float
    """The weighted sum of `terms`."""
    terms: dict[str, float]
    """Unweighted score of each function that returned one, by label, in the order of `reward.functions`."""
    extra: dict[str, float] = field(default_factory=dict)
    timeouts: int = 0
    """Number of functions that timed out on the sample."""
    failures: int = 0
    """Number of functions that failed on the sample."""
    notes: dict[str, Any] = field(default_factory=dict)
    """The notes of all functions (see `Score.notes`)."""

    @property
    def correct(self) -> bool:
        """Whether the first function that returned a score returned at least 1."""
        return next(iter(self.terms.values())) >= 1


class Scorer(Protocol):
    """One reward function."""

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """Return one score for each item, in order."""

    def close(self) -> None:
        """End the processes that the function started; by default none."""
        return


class RewardError(Exception):
    """A function or its process failed on a sample; the message has the sample and the function's traceback."""


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
