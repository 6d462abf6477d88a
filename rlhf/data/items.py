"""Items of the data room: a raw row of any source, and the tokenised prompt made from it."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Prompt:
    """One problem as the trainer sees it. `token_ids` has the chat template applied and the generation prompt added."""

    index: int
    messages: list[dict[str, str]]
    token_ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
