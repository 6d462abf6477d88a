"""Items of the data room: a raw row of any source, the tokenised prompt made from it, and its place in a run."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One problem before tokenisation; `index` is its place in the whole source, `where` names it for a person."""

    index: int
    where: str
    messages: list[dict[str, str]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns that reward functions read."""


@dataclass(frozen=True)
class Prompt:
    """One problem as the trainer sees it. `token_ids` has the chat template applied and the generation prompt added."""

    index: int
    messages: list[dict[str, str]]
    token_ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    """As the row's."""


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt at its place in the stream of all prompts, which is its `uid` for the whole run."""

    uid: int
    prompt: Prompt
