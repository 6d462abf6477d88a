"""Defines a row of any source, the tokenized prompt of a row, and the position of a prompt in a run."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One problem before tokenization. `index` is its position in all sources; `where` names the row in messages."""

    index: int
    where: str
    messages: list[dict[str, str]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    """More columns that reward functions read."""


@dataclass(frozen=True)
class Prompt:
    """One tokenized problem. `token_ids` include the chat template and the generation prompt."""

    index: int
    messages: list[dict[str, str]]
    token_ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    """See `Row.columns`."""


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt and its `uid`: the position in the stream of all prompts of a run."""

    uid: int
    prompt: Prompt
