"""Calls a user's reward function by its convention, in a reward process, and parses the scores that it returns."""

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from numbers import Real
from typing import Any

from rlhf.errors import UserError
from rlhf.reward.scores import RewardItem, Score
from rlhf.reward.signature import FIELDS, PROMPT, Convention, Signature

_LONGEST_NOTE = 10_000
"""Maximum number of characters of a note (`Score.notes`)."""

Failure = Callable[[BaseException], dict[str, Any]]
"""Converts an error to an entry of a reply."""


class FunctionCall:
    """Calls the function of `setting`, such as `reward.functions=f.py:score`, with the arguments that it accepts."""

    def __init__(
        self, setting: str, function: Callable[..., Any], kwargs: dict[str, Any], timeout_s: float, failure: Failure
    ) -> None:
        self._setting, self._function, self._timeout_s, self._failure = setting, function, timeout_s, failure
        self.signature = signature = Signature.of(function)
        if problem := signature.problem():
            raise UserError(f"{setting}: the function {problem}")
        self._convention = signature.convention
        self._kwargs = {name: value for name, value in kwargs.items() if signature.accepts(name)}
        self._columns = set(signature.columns(kwargs))
        # One event loop for all calls: an async client works only in the loop in which the user's file opened it.
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, items: Sequence[RewardItem]) -> list[dict[str, Any]]:
        """Return one reply entry per item. Errors of the function propagate; an async call's error becomes an entry."""
        if self._convention is not Convention.SAMPLE:
            return [asdict(score) for score in self._batch(items)]
        if not self.signature.is_async:
            values = [self._finished(self._function(**self._of_sample(item))) for item in items]
            return [asdict(as_score(value, self._setting)) for value in values]
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(self._concurrently(items))

    async def _concurrently(self, items: Sequence[RewardItem]) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*map(self._entry, items)))

    async def _entry(self, item: RewardItem) -> dict[str, Any]:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value = await self._function(**self._of_sample(item))
            return asdict(as_score(value, self._setting))
        except (Exception, SystemExit) as error:
            # A timeout that the function itself raised is an error like any other.
            return asdict(Score(0.0, timed_out=True)) if limit.expired() else self._failure(error)

    def _of_sample(self, item: RewardItem) -> dict[str, Any]:
        fields = {"solution_str": item.response, "messages": item.messages}
        fields |= {name: getattr(item, name) for name in FIELDS}
        given = self._accepted(fields) | {name: fields[ours] for name, ours in self.signature.renamed.items()}
        columns = _columns(item)
        return given | {name: columns[name] for name in self._columns if name in columns} | self._kwargs

    def _batch(self, items: Sequence[RewardItem]) -> list[Score]:
        logged = _Logged(self._setting, len(items))
        given = self._of_trl(items, logged) if self._convention is Convention.TRL else self._of_batch(items)
        values = self._finished(self._function(**given))
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(items):
            what = f"{len(values)} scores" if isinstance(values, list | tuple) else _shown(values)
            raise UserError(
                f"{self._setting} returned {what} for {len(items)} samples. Return a list with one score each."
            )
        may_abstain = self._convention is Convention.TRL
        return [logged.added_to(as_score(value, self._setting, may_abstain), i) for i, value in enumerate(values)]

    def _finished(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        self._loop = self._loop or asyncio.new_event_loop()

        async def awaited(it: Awaitable[Any]) -> Any:
            return await it

        return self._loop.run_until_complete(awaited(value))

    def _of_batch(self, items: Sequence[RewardItem]) -> dict[str, Any]:
        lists: dict[str, Any] = {"solution_strs": [item.response for item in items]}
        lists |= {"messages": [item.messages for item in items]}
        lists |= {f"{name}s": [getattr(item, name) for item in items] for name in FIELDS}
        return self._accepted(lists) | self._column_lists(items, self._columns) | self._kwargs

    def _of_trl(self, items: Sequence[RewardItem], logged: "_Logged") -> dict[str, Any]:
        lists = {
            "prompts": [_columns(item)[PROMPT] for item in items],
            "completions": [_completion(item) for item in items],
            "completion_ids": [item.token_ids for item in items],
            "log_extra": logged.extra,
            "log_metric": logged.metric,
        }
        names = set(self._columns)
        if self.signature.rest:
            names |= {name for item in items for name in item.columns} - {PROMPT, "completion", "completion_ids"}
        return self._column_lists(items, names) | self._accepted(lists) | self._kwargs

    def _accepted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if self.signature.accepts(name)}

    def _column_lists(self, items: Sequence[RewardItem], names: set[str]) -> dict[str, list[Any]]:
        rows = [_columns(item) for item in items]
        return {name: [row.get(name) for row in rows] for name in sorted(names) if any(name in row for row in rows)}


class _Logged:
    """Collects the values that a TRL function logs in addition to its scores, for the samples of one call."""

    def __init__(self, setting: str, count: int) -> None:
        self._setting, self._count = setting, count
        self._notes: dict[str, list[Any]] = {}
        self._numbers: dict[str, float] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """`log_extra` of TRL: record a value for each sample."""
        if len(values) != self._count:
            raise UserError(
                f"{self._setting} logged {len(values)} values of {column!r} for {self._count} samples. Log one value "
                "for each sample."
            )
        self._notes[str(column)] = list(values)

    def metric(self, name: str, value: float) -> None:
        """`log_metric` of TRL: record a number for all samples."""
        self._numbers[str(name)] = _number(self._setting, value, f"{name}=")

    def added_to(self, score: Score, i: int) -> Score:
        notes = {name: as_note(values[i]) for name, values in self._notes.items()}
        return Score(score.score, score.extra | self._numbers, score.notes | notes)


def _columns(item: RewardItem) -> dict[str, Any]:
    return {name: getattr(item, name) for name in FIELDS} | {PROMPT: item.messages} | item.columns


def _completion(item: RewardItem) -> Any:
    """Return the response as TRL passes it: a text if the prompt is a text, else a chat; an episode is a chat."""
    if item.conversation:
        return item.conversation
    if isinstance(item.columns.get(PROMPT), str):
        return item.response
    return [{"role": "assistant", "content": item.response}]


def as_score(value: Any, setting: str, may_abstain: bool = False) -> Score:
    """Parse the score of one sample from the return value of the function of `setting`.

    A dict has its score in `score`; its other numbers become metrics, and all other values notes. A tuple starts with
    its score; the other elements become one note, as in verl's prime_code. None means no score if `may_abstain`. Raise
    UserError for any other value, and for numbers that are not finite.
    """
    if value is None and may_abstain:
        return Score(None)
    if isinstance(value, tuple) and len(value) > 1:
        first, *rest = value
        return Score(_number(setting, first), notes={"metadata": as_note(rest[0] if len(rest) == 1 else rest)})
    if not isinstance(value, dict):
        return Score(_number(setting, value))
    if "score" not in value:
        raise UserError(f"{setting} returned a dict without 'score': {_shown(value)}. Add this key.")
    others = {str(key): _plain(each) for key, each in value.items() if key != "score"}
    numbers = {key: _number(setting, each, f"{key}=") for key, each in others.items() if isinstance(each, Real)}
    notes = {key: as_note(each) for key, each in others.items() if key not in numbers}
    return Score(_number(setting, value["score"], "score="), numbers, notes)


def _plain(value: Any) -> Any:
    """Convert a zero-dimensional array (NumPy, torch) to a number; return other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _number(setting: str, value: Any, name: str = "") -> float:
    """Return a finite number. `name`: what precedes another value in the message, such as `score=`."""
    value = _plain(value)
    try:
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond the largest float
        pass
    raise UserError(
        f"{setting} returned {name}{_shown(value)} ({type(value).__name__}). Return a finite number, or a dict with a "
        "finite 'score'."
    )


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an integer of over 4300 digits, or a deep list
        return f"a {type(value).__name__} that cannot be shown"


def as_note(value: Any) -> Any:
    """Return `value` in types of JSON, truncated if long. Values that JSON lacks become text."""
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):  # for example, a list contains itself
        text = json.dumps(_shown(value))
    if len(text) > _LONGEST_NOTE:
        return (value if isinstance(value, str) else text)[:_LONGEST_NOTE] + " ..."
    return json.loads(text, parse_constant=str)
