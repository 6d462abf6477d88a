"""Makes rows with the user's code, `data.custom_cls`: a function that converts a row, or a Dataset class as in verl.

Every rank runs the code before models load. The fingerprint covers the rows, so that a resume with other rows is an
error.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf.config import DataConfig
from rlhf.config.user_functions import CUSTOM_CLS, check_positional, load_function, split_spec
from rlhf.data.records import Source
from rlhf.errors import UserError
from rlhf.reward import WantedColumns

FOR_VERL = {"return_raw_chat": True, "filter_overlong_prompts": False, "truncation": "left"}
"""verl settings with which verl's own Dataset classes return all rows, with messages."""
RAW_PROMPT = "raw_prompt"
"""Key of the messages in an item of verl's Dataset classes."""

CustomRecord = tuple[str, str, dict[str, Any]]
"""The row's default data source, its location for error messages, and its columns."""


def check_custom(spec: str) -> None:
    """Raise UserError if the file or name is missing, or if a function does not accept one row. Runs no code."""
    check_positional(CUSTOM_CLS, spec, ["row"])


def custom_records(
    data: DataConfig, sources: Sequence[Source], tokenizer: Any, seed: int, max_samples: int | None
) -> list[CustomRecord]:
    """Return the rows that the user's code makes, at most `max_samples` of them.

    The random generators of Python, NumPy and torch start in the same state on all ranks. Afterwards this function
    restores their earlier state.

    Raises:
        UserError: the code cannot be imported, raises an error, or returns anything but a dict.
    """
    from rlhf.ranks.rng import rng_state, seed_everything, set_rng_state  # imports torch

    spec = data.custom_cls.spec
    assert spec is not None
    before = rng_state()
    seed_everything(seed, 0)
    try:
        made = load_function(CUSTOM_CLS, spec)
        seed_everything(seed, 0)  # the import, in the first call only, may have drawn random numbers
        if isinstance(made, type):
            records = _of_class(made, spec, data, sources, tokenizer, max_samples)
        else:
            records = _of_function(made, spec, sources)
        return list(islice(records, max_samples))
    finally:
        set_rng_state(before)


def _of_function(function: Callable[..., Any], spec: str, sources: Sequence[Source]) -> Iterator[CustomRecord]:
    for source in sources:
        for where, record in source.records("", "", WantedColumns(reads_all=True)):
            yield source.label, where, _record(where, spec, function, record)


def _of_class(
    kind: type, spec: str, data: DataConfig, sources: Sequence[Source], tokenizer: Any, max_samples: int | None
) -> Iterator[CustomRecord]:
    from omegaconf import OmegaConf

    where = sources[0].setting
    arguments = {
        "data_files": [source.spec if source.path is None else str(source.path) for source in sources],
        "tokenizer": tokenizer,
        "processor": None,
        "config": OmegaConf.create(asdict(data) | FOR_VERL),
        "max_samples": -1 if max_samples is None else max_samples,
    }
    parameters = inspect.signature(kind).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}
    taken = {name: value for name, value in arguments.items() if takes_all or name in named}
    dataset = _call(where, spec, lambda: kind(**taken))
    for i in range(_call(where, spec, lambda: len(dataset))):
        at = f"{where}: row {i}"
        record = _record(at, spec, lambda i: dataset[i], i)
        if RAW_PROMPT in record:
            record[data.prompt_key] = record.pop(RAW_PROMPT)
        yield kind.__name__, at, record


def _record(where: str, spec: str, function: Callable[..., Any], argument: Any) -> dict[str, Any]:
    made = _call(where, spec, lambda: function(argument))
    if not isinstance(made, dict):
        raise UserError(
            f"{where}: {CUSTOM_CLS}={spec} returned {type(made).__name__}, not a dict of columns. Return the row."
        )
    try:
        for name in made:
            if not isinstance(name, str):
                raise _ForeignValueError(f"a column whose name is not a text, {name!r}")
        return _plain(made)
    except (_ForeignValueError, RecursionError) as error:
        what = str(error) if isinstance(error, _ForeignValueError) else "a list or dict that contains itself"
        raise UserError(
            f"{where}: {CUSTOM_CLS}={spec} returned a row with {what}. Return numbers, texts, dates, decimals, bytes, "
            "lists and dicts: a resume compares rows with those of the run's start."
        ) from None


class _ForeignValueError(Exception):
    """A row has a value that may differ, or whose text may differ, in another process."""


def _call(where: str, spec: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (UserError, MemoryError):
        raise
    except Exception as error:
        path, _ = split_spec(CUSTOM_CLS, spec)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
        line = f" (line {lines[-1]} of {path.name})" if lines else ""
        raise UserError(
            f"{where}: {CUSTOM_CLS}={spec} raised {type(error).__name__}: {error}{line}. Correct the code or the row."
        ) from error


def _plain(value: Any) -> Any:
    """Return the value with lists instead of tuples, arrays and tensors. Raise _ForeignValueError for other objects."""
    if isinstance(value, dict):
        return {_plain_key(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if value is None or isinstance(value, (bool, int, float, str, bytes, date, time, timedelta, Decimal)):
        return value
    raise _ForeignValueError(f"a value of type {type(value).__name__}")


def _plain_key(key: Any) -> Any:
    key = key.item() if hasattr(key, "item") else key
    if key is None or isinstance(key, (bool, int, float, str)):
        return key
    raise _ForeignValueError(f"a key of type {type(key).__name__}")
