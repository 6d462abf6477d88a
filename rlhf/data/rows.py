"""Checks the records of a file or Hub dataset, and converts verl's columns or a plain prompt and answer to rows."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rlhf.config import DataConfig
from rlhf.data.items import Row
from rlhf.errors import UserError

VERL_COLUMNS = ("data_source", "reward_model", "extra_info")


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the closest of `choices`, or an empty text."""
    close = difflib.get_close_matches(name, list(choices), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Return `names` with commas, or "none", for an error message."""
    return ", ".join(names) or "none"


def parse_row(
    record: Mapping[str, Any],
    index: int,
    where: str,
    default_source: str,
    prompt_key: str,
    answer_key: str,
    need_answer: bool,
) -> Row:
    """Check one record and convert it to a row. Raise UserError with `where` for a missing column or a wrong type."""
    if prompt_key not in record:
        raise UserError(
            f"{where}: no column {prompt_key!r} (data.prompt_key); it has {listed(record)}."
            f"{suggestion(prompt_key, record)} Set data.prompt_key to the column with the prompt."
        )
    for name, kind, what in (("extra_info", dict, "a mapping"), ("data_source", str, "a string")):
        if (value := record.get(name)) is not None and not isinstance(value, kind):
            raise UserError(f"{where}: {name} must be {what}, not {type(value).__name__}: {_short(value)}. Correct it.")
    return Row(
        index=index,
        where=where,
        messages=_messages(record[prompt_key], where, prompt_key),
        data_source=record.get("data_source") or default_source,
        ground_truth=_ground_truth(record, where, answer_key, need_answer),
        extra_info=record.get("extra_info") or {},
    )


def _messages(prompt: Any, where: str, prompt_key: str) -> list[dict[str, str]]:
    column = f"{where}: column {prompt_key!r} (data.prompt_key)"
    if prompt is None:
        raise UserError(f"{column} is null in this row. Fill it in, or delete the row.")
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    is_chat = isinstance(chat, list) and chat and all(isinstance(message, dict) for message in chat)
    if not is_chat or not all(isinstance(message.get(key), str) for message in chat for key in ("role", "content")):
        raise UserError(
            f"{column} must be a string or a list of {{role, content}} with two strings, not {type(prompt).__name__}: "
            f"{_short(prompt)}. Correct the column, or set data.prompt_key to another column."
        )
    if not any(message["content"].strip() for message in chat):
        raise UserError(f"{column} has an empty prompt in this row. Fill it in, or delete the row.")
    return [{key: value for key, value in message.items() if isinstance(value, str)} for message in chat]


def with_system_prompt(row: Row, text: str | None) -> Row:
    """Return the row with `text` as its system message, unless the row already has a system message."""
    if text is None or row.messages[0]["role"] == "system":
        return row
    return replace(row, messages=[{"role": "system", "content": text}, *row.messages])


def _ground_truth(record: Mapping[str, Any], where: str, answer_key: str, need_answer: bool) -> Any:
    reward_model = record.get("reward_model")
    if isinstance(reward_model, dict) and not _is_null(reward_model.get("ground_truth")):
        return reward_model["ground_truth"]
    if not _is_null(record.get(answer_key)):
        return record[answer_key]
    if not need_answer and (answer_key == DataConfig.answer_key or answer_key in record or reward_model is not None):
        return None
    if reward_model is not None and not isinstance(reward_model, dict) and answer_key not in record:
        raise UserError(
            f"{where}: reward_model must be a mapping with ground_truth, not {type(reward_model).__name__}: "
            f"{_short(reward_model)}. Write {{ground_truth: ANSWER}}, or set data.answer_key to the answer's column."
        )
    for column in (answer_key, "reward_model"):
        if column in record:
            what = "reward_model.ground_truth" if column == "reward_model" else column
            raise UserError(
                f"{where}: the reference answer, column {what!r}, is null in this row. Fill it in, delete the row, or "
                "set data.answer_key to another column."
            )
    raise UserError(
        f"{where}: the reference answer is missing: no column {answer_key!r} (data.answer_key); it has "
        f"{listed(record)}.{suggestion(answer_key, record)} Set data.answer_key to the column with the answer, or add "
        "reward_model.ground_truth."
    )


def _is_null(value: Any) -> bool:
    """Return whether a cell is empty: None, or pandas' NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
