"""Checks the records of a file or Hub dataset, and converts verl's columns or a plain prompt and answer to rows."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from rlhf.config import DataConfig
from rlhf.data.items import Row
from rlhf.errors import UserError, did_you_mean

VERL_COLUMNS = ("data_source", "reward_model", "extra_info")
PROMPTS = ("prompt", "question", "problem", "messages", "conversations", "instruction", "query", "input")
"""Usual names of the column with the prompt."""
ANSWERS = ("answer", "solution", "final_answer", "ground_truth", "label", "target", "response", "output")
"""Usual names of the column with the reference answer."""
HALF_PAIR = re.compile("[\ud800-\udfff]")
CALLS = ("tool_calls", "function_call")
"""Fields of a message that contain tool calls, as in OpenAI's chat format."""
ANSWERING = ("assistant", "gpt", "model")
"""Roles of turns that the model writes."""


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the closest of `choices`, or an empty text."""
    close = difflib.get_close_matches(name, list(choices), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Return `names` with commas, or "none", for an error message."""
    return ", ".join(names) or "none"


def parse_row(
    record: Mapping[str, Any], index: int, where: str, default_source: str, data: DataConfig, need_answer: bool
) -> Row:
    """Check one record and convert it to a row. Raise UserError with `where` if a column is missing or invalid."""
    if data.prompt_key not in record:
        near, answer = _near(data.prompt_key, PROMPTS, record), _near(data.answer_key, ANSWERS, record)
        with_answer = {data.answer_key, "reward_model"}.isdisjoint(record) and answer not in (None, near)
        overrides = f"data.prompt_key={near}" + (f" data.answer_key={answer}" if with_answer else "")
        raise UserError(
            f"{where}: no column {data.prompt_key!r} (data.prompt_key); it has {listed(record)}."
            f"{did_you_mean(near and overrides)} Set data.prompt_key to the column with the prompt."
        )
    for name, kind, what in (("extra_info", dict, "a mapping"), ("data_source", str, "a string")):
        if (value := record.get(name)) is not None and not isinstance(value, kind):
            raise UserError(f"{where}: {name} must be {what}, not {type(value).__name__}: {_short(value)}. Correct it.")
    return Row(
        index=index,
        where=where,
        messages=_messages(record[data.prompt_key], where, data),
        data_source=record.get("data_source") or default_source,
        ground_truth=_ground_truth(record, where, data, need_answer),
        extra_info=record.get("extra_info") or {},
    )


def _near(key: str, usual: Iterable[str], record: Mapping[str, Any]) -> str | None:
    close = difflib.get_close_matches(key, list(record), n=1, cutoff=0.5)
    return next((name for name in (*usual, *close) if name in record), None)


def with_last_turn_as_answer(record: dict[str, Any], where: str, data: DataConfig) -> dict[str, Any]:
    """Return the record with the chat before its last turn as the prompt, and this turn's text as the answer.

    Raise UserError if the chat does not end with a turn of the model.
    """
    chat = record.get(data.prompt_key)
    if data.prompt_key not in record or _is_sharegpt(chat):
        return record  # `parse_row` reports the error
    turns = chat if isinstance(chat, list) else []
    last = turns[-1] if len(turns) > 1 else None
    if not isinstance(last, dict) or last.get("role") not in ANSWERING or not isinstance(last.get("content"), str):
        raise UserError(
            f"{where}: column {data.prompt_key!r} (data.prompt_key) must be a list of messages that ends with an "
            f"assistant turn, since data.last_turn_as_answer=true; it is {_short(chat)}. Correct or delete the row, or "
            "set data.last_turn_as_answer=false."
        )
    return {**record, data.prompt_key: turns[:-1], data.answer_key: last["content"]}


def _messages(prompt: Any, where: str, data: DataConfig) -> list[dict[str, str]]:
    column = f"{where}: column {data.prompt_key!r} (data.prompt_key)"
    if prompt is None:
        raise UserError(f"{column} is null in this row. Fill it in, or delete the row.")
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if _is_sharegpt(chat):
        raise UserError(
            f"{column} has ShareGPT's from and value: {_short(prompt)}. Write role and content instead, with role user "
            "for human and assistant for gpt, in the file or with data.custom_cls."
        )
    is_chat = isinstance(chat, list) and chat and all(isinstance(message, dict) for message in chat)
    if not is_chat or not all(isinstance(message.get(key), str) for message in chat for key in ("role", "content")):
        raise UserError(
            f"{column} must be a string or a list of {{role, content}} with two strings, not {type(prompt).__name__}: "
            f"{_short(prompt)}. Correct the column, or set data.prompt_key to another column."
        )
    # A chat template may print every text of a message, including its role and name.
    if half := next((text for message in chat for text in message.values() if is_half_pair(text)), None):
        raise UserError(
            f"{column} has half of a surrogate pair in this row, which is not a character: {_short(half)}. Correct or "
            "delete the row."
        )
    if not any(message["content"].strip() for message in chat):
        raise UserError(f"{column} has an empty prompt in this row. Fill it in, or delete the row.")
    if chat[-1]["role"] in ANSWERING:
        raise UserError(f"{column} {_ends_with_answer(chat, removed=int(data.last_turn_as_answer))}")
    if calling := next((name for name in CALLS for message in chat if message.get(name)), None):
        raise UserError(
            f"{column} has {calling} in this row, which the trainer would leave out: the model would not see the "
            "calls. Write them into content as the model writes them, or delete the row."
        )
    return [{key: value for key, value in message.items() if isinstance(value, str)} for message in chat]


def _ends_with_answer(chat: Sequence[Mapping[str, str]], removed: int) -> str:
    """Describe a chat that still ends with turns of the model after `removed` (0 or 1) of them became the answer."""
    role = chat[-1]["role"]
    turns = removed + sum(1 for _ in takewhile(lambda turn: turn["role"] in ANSWERING, reversed(chat)))
    if turns == 1:
        return (
            f"ends with a turn of role {role} in this row: the model would see the answer. Remove this turn, or set "
            "data.last_turn_as_answer=true to use it as the reference answer."
        )
    return (
        f"ends with {turns} turns of role {role} in this row: the model would see an answer. Remove these turns; or "
        "write only one of them, which data.last_turn_as_answer=true uses as the reference answer."
    )


def _is_blank(value: Any) -> bool:
    return (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value)


def _is_sharegpt(chat: Any) -> bool:
    turns = chat if isinstance(chat, list) else []
    return any(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in turns)


def with_system_prompt(row: Row, text: str | None) -> Row:
    """Return the row with `text` as its system message, unless the row already has a system message."""
    if text is None or row.messages[0]["role"] == "system":
        return row
    return replace(row, messages=[{"role": "system", "content": text}, *row.messages])


def _ground_truth(record: Mapping[str, Any], where: str, data: DataConfig, need_answer: bool) -> Any:
    reward_model, answer_key = record.get("reward_model"), data.answer_key
    if data.last_turn_as_answer:
        return record[answer_key]
    nested = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    answers = [nested, record.get(answer_key)]
    if answer_key != DataConfig.answer_key:  # the user's choice comes before verl's layout
        answers.reverse()
    for answer in answers:
        # Some published test splits have blank answers. An empty response would equal a blank answer and be right.
        if not (_is_null(answer) or (need_answer and _is_blank(answer))):
            return answer
    if not _is_null(reward_model) and not isinstance(reward_model, dict) and answer_key not in record:
        raise UserError(
            f"{where}: reward_model must be a mapping with ground_truth, not {type(reward_model).__name__}: "
            f"{_short(reward_model)}. Write {{ground_truth: ANSWER}}, set data.answer_key to the answer's column, or "
            "rename the column."
        )
    if not need_answer and (answer_key == DataConfig.answer_key or answer_key in record or reward_model is not None):
        return None
    for column in (answer_key, "reward_model"):
        if column in record:
            what = "reward_model.ground_truth" if column == "reward_model" else column
            raise UserError(
                f"{where}: the reference answer, column {what!r}, is null or blank in this row. Fill it in, delete the "
                "row, or set data.answer_key to another column."
            )
    near = _near(answer_key, ANSWERS, {name: None for name in record if name != data.prompt_key})
    override = near and f"data.answer_key={near}"
    raise UserError(
        f"{where}: the reference answer is missing: no column {answer_key!r} (data.answer_key); it has "
        f"{listed(record)}.{did_you_mean(override)} Set data.answer_key to the column with the answer, or add "
        "reward_model.ground_truth."
    )


def is_half_pair(text: Any) -> bool:
    """Return whether `text` is a string with half of a surrogate pair.

    UTF-8 cannot encode such a string, and tokenizers reject it.
    """
    return isinstance(text, str) and HALF_PAIR.search(text) is not None


def _is_null(value: Any) -> bool:
    """Return whether a cell is empty: None, or pandas' NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
