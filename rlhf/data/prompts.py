"""The prompts of a source as tokens, with the over-long policy applied and counted."""

import json
import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from rlhf.data.items import Prompt, Row
from rlhf.errors import UserError

log = logging.getLogger(__name__)

BATCH = 1000


class PromptSet:
    """A sequence of `Prompt`s. All are tokenised once at construction: the over-long policy needs every length.

    dropped, truncated: prompts that the policy removed or shortened. fingerprint: a hash of the rows that are left.
    Raises UserError if the tokenizer has no chat template, refuses a chat, or the policy leaves nothing or says so.
    """

    def __init__(self, rows: Sequence[Row], tokenizer: Any, max_prompt_length: int, overlong: str, setting: str):
        self.dropped = self.truncated = 0
        self._rows: list[Row] = []
        kept: list[list[int]] = []
        too_long: list[int] = []
        for row, token_ids in zip(rows, _tokenize(rows, tokenizer), strict=True):
            if len(token_ids) > max_prompt_length:
                too_long.append(len(token_ids))
                if overlong in ("filter", "error"):
                    continue
                token_ids = truncate(token_ids, max_prompt_length, overlong)
            self._rows.append(row)
            kept.append(token_ids)
        if too_long:
            self._apply_policy(too_long, len(rows), max_prompt_length, overlong, setting)
        # One flat array: a list of lists costs eight times the memory, and every rank holds the whole set.
        self._ends = np.cumsum([len(token_ids) for token_ids in kept])
        self._tokens = np.fromiter(chain.from_iterable(kept), dtype=np.int32, count=int(self._ends[-1]))
        self.fingerprint = _fingerprint(self._rows)

    def _apply_policy(self, too_long: list[int], total: int, limit: int, overlong: str, setting: str) -> None:
        facts = (
            f"{len(too_long)} of {total} prompts of {setting} are longer than data.max_prompt_length={limit} tokens "
            f"(the longest has {max(too_long)}, chat template included)"
        )
        remedy = "Raise data.max_prompt_length, or set data.overlong_prompts"
        if overlong == "error":
            raise UserError(f"{facts}, and data.overlong_prompts=error. {remedy} to filter, left, right or middle.")
        if not self._rows:
            raise UserError(f"{facts}, so data.overlong_prompts=filter leaves none. {remedy} to left, right or middle.")
        if overlong == "filter":
            self.dropped = len(too_long)
            log.warning("%s; dropped.", facts)
        else:
            self.truncated = len(too_long)
            log.warning("%s; truncated (data.overlong_prompts=%s).", facts, overlong)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Prompt:
        if not 0 <= i < len(self._rows):
            raise IndexError(i)
        row = self._rows[i]
        start = self._ends[i - 1] if i else 0
        return Prompt(
            index=row.index,
            messages=row.messages,
            token_ids=self._tokens[start : self._ends[i]].tolist(),
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )


def truncate(token_ids: list[int], limit: int, side: str) -> list[int]:
    """Cut at `side`, as verl's `truncation` does: "left" keeps the end, "right" the start, "middle" half of each."""
    if side == "left":
        return token_ids[-limit:]
    if side == "right":
        return token_ids[:limit]
    head = limit // 2
    return token_ids[:head] + token_ids[len(token_ids) - (limit - head) :]


def _tokenize(rows: Sequence[Row], tokenizer: Any) -> list[list[int]]:
    import jinja2

    if tokenizer.chat_template is None:
        raise UserError(
            f"model.path={tokenizer.name_or_path}: its tokenizer has no chat template, so prompts cannot be rendered. "
            f"Take an instruction-tuned model, or set model.chat_template to a Jinja file."
        )
    ids: list[list[int]] = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        try:
            ids += tokenizer.apply_chat_template([row.messages for row in part], add_generation_prompt=True)[
                "input_ids"
            ]
        except jinja2.TemplateError:
            # Again one by one, to name the row.
            ids += [_tokenize_one(row, tokenizer) for row in part]
    return ids


def _tokenize_one(row: Row, tokenizer: Any) -> list[int]:
    import jinja2

    try:
        return tokenizer.apply_chat_template(row.messages, add_generation_prompt=True)["input_ids"]
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in row.messages)
        raise UserError(
            f"{row.where}: the chat template of model.path refuses the prompt (roles: {roles}): {error}. Correct the "
            f"prompt, or set model.chat_template."
        ) from error


def _fingerprint(rows: Sequence[Row]) -> str:
    digest = xxhash.xxh3_128()
    for row in rows:
        fields = (row.messages, row.data_source, row.ground_truth, row.extra_info)
        digest.update(json.dumps(fields, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()
