"""Tokenizes prompts with the chat template, and drops, truncates or rejects prompts that are too long."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from typing import Any, TypeVar

from rlhf.data.chat_checks import ChatChecks
from rlhf.data.items import Row
from rlhf.data.template_date import uses_date, with_date
from rlhf.errors import UserError
from rlhf.models.template_check import check_variables, missing_template

log = logging.getLogger(__name__)

T = TypeVar("T")
_RAISED_BY_TEMPLATES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Python's errors in template expressions, besides Jinja's own."""
BATCH = 1000
"""Rows to tokenize at a time."""
REMEDY = "Raise data.max_prompt_length, or set data.overlong_prompts"


def in_batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists of BATCH items; the last may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, BATCH)):
        yield batch


@dataclass
class Lengths:
    """Counts of all rows and of rows that are too long, and the tokens of the longest such row."""

    rows: int = 0
    too_long: int = 0
    longest: int = 0


@dataclass(frozen=True)
class LengthLimit:
    """The length limit: `data.max_prompt_length`, `data.overlong_prompts`, and the setting of the rows' source."""

    max_prompt_length: int
    overlong: str
    setting: str
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """`data.apply_chat_template_kwargs`."""
    day: date = field(default_factory=date.today)
    """The day that templates print: the day on which the run started."""

    def tokenized(self, rows: Iterable[Row], tokenizer: Any, lengths: Lengths) -> Iterator[tuple[Row, list[int]]]:
        """Yield the remaining rows in order, with token ids; `lengths` counts all rows.

        Raises UserError if the tokenizer has no chat template, or the template rejects a chat or leaves out a message.
        """
        for row, token_ids in _tokenized(rows, tokenizer, self.template_variables, self.day):
            lengths.rows += 1
            if len(token_ids) > self.max_prompt_length:
                lengths.too_long += 1
                lengths.longest = max(lengths.longest, len(token_ids))
                if self.overlong in ("filter", "error"):
                    continue
                token_ids = truncate(token_ids, self.max_prompt_length, self.overlong)
            yield row, token_ids

    def check(self, lengths: Lengths) -> None:
        """Raise UserError for overlong prompts if `data.overlong_prompts` is `error`, or `filter` leaves no prompt."""
        if lengths.too_long and self.overlong == "error":
            raise UserError(
                f"{self._facts(lengths)}, and data.overlong_prompts=error. {REMEDY} to filter, left, right or middle."
            )
        if lengths.too_long and self.overlong == "filter" and lengths.too_long == lengths.rows:
            raise UserError(
                f"{self._facts(lengths)}, so data.overlong_prompts=filter leaves none. {REMEDY} to left, right or "
                "middle."
            )

    def warn(self, lengths: Lengths) -> None:
        """Log one warning if prompts were dropped or truncated."""
        if lengths.too_long and self.overlong == "filter":
            log.warning("%s; dropped.", self._facts(lengths))
        elif lengths.too_long:
            log.warning("%s; truncated (data.overlong_prompts=%s).", self._facts(lengths), self.overlong)

    def _facts(self, lengths: Lengths) -> str:
        return (
            f"{lengths.too_long} of {lengths.rows} prompts of {self.setting} are longer than "
            f"data.max_prompt_length={self.max_prompt_length} tokens "
            f"(the longest has {lengths.longest}, chat template included)"
        )


def truncate(token_ids: list[int], limit: int, side: str) -> list[int]:
    """Truncate at `side`, as verl's `truncation`: "left" keeps the end, "right" the start, "middle" half of each."""
    if side == "left":
        return token_ids[-limit:]
    if side == "right":
        return token_ids[:limit]
    head = limit // 2
    return token_ids[:head] + token_ids[len(token_ids) - (limit - head) :]


def _tokenized(
    rows: Iterable[Row], tokenizer: Any, variables: Mapping[str, Any], day: date
) -> Iterator[tuple[Row, list[int]]]:
    import jinja2

    if tokenizer.chat_template is None:
        raise missing_template(tokenizer.name_or_path)
    check_variables(f"model.path={tokenizer.name_or_path}", str(tokenizer.chat_template), variables)
    options = {**variables, "add_generation_prompt": True}
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if template is not None and uses_date(template):
        options["chat_template"] = with_date(template, day, variables)

    def render(messages: Sequence[dict[str, str]], generation_prompt: bool) -> str | None:
        final = {**options, "add_generation_prompt": generation_prompt, "tokenize": False}
        try:
            return tokenizer.apply_chat_template(messages, **final)
        except (jinja2.TemplateError, *_RAISED_BY_TEMPLATES):
            return None

    checks = ChatChecks(f"model.path={tokenizer.name_or_path}, or model.chat_template", render)
    for part in in_batches(rows):
        try:
            ids = tokenizer.apply_chat_template([row.messages for row in part], **options)["input_ids"]
        except (jinja2.TemplateError, *_RAISED_BY_TEMPLATES):
            # Tokenize one by one, to name the row in the message.
            ids = [_tokenize_one(row, tokenizer, options) for row in part]
        if empty := [row for row, tokens in zip(part, ids, strict=True) if not tokens]:
            raise UserError(
                f"{empty[0].where}: the chat template renders the prompt to zero tokens. Correct the prompt, or set "
                "model.chat_template."
            )
        for row in part:
            checks.check(row)
        yield from zip(part, ids, strict=True)


def _tokenize_one(row: Row, tokenizer: Any, options: Mapping[str, Any]) -> list[int]:
    import jinja2

    try:
        return tokenizer.apply_chat_template(row.messages, **options)["input_ids"]
    except jinja2.TemplateSyntaxError as error:
        line = error.lineno - ("chat_template" in options)  # `with_date` adds a line
        raise UserError(
            f"model.path={tokenizer.name_or_path}: its chat template (or model.chat_template), line {line}, is "
            f"not valid: {error.message}. Correct it, or set model.chat_template to another."
        ) from error
    except (jinja2.TemplateError, *_RAISED_BY_TEMPLATES) as error:
        roles = ", ".join(message["role"] for message in row.messages)
        raise UserError(
            f"{row.where}: the chat template of model.path rejects the prompt (roles: {roles}): {error}. Correct the "
            f"prompt, or set model.chat_template."
        ) from error
