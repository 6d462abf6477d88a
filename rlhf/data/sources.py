"""Prompt sets from the `data` settings, and early checks of the same sources before anything heavy is loaded."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from rlhf.config import DataConfig
from rlhf.config.reward import VERIFIERS
from rlhf.data import procedural
from rlhf.data.items import Row
from rlhf.data.prompts import PromptSet
from rlhf.data.records import Source, resolve
from rlhf.data.rows import parse_row
from rlhf.errors import UserError

_TRAIN, _VAL, _GYM = "data.train_files", "data.val_files", "data.reasoning_gym"


def build_train_set(data: DataConfig, rewards: Sequence[str], seed: int, tokenizer: Any) -> PromptSet:
    """The training prompts, tokenised.

    Args:
        rewards: `reward.functions`, which say whether rows need an answer.
        seed: `trainer.seed`, from which generated problems follow.

    Raises:
        UserError: any mistake in settings or data.
    """
    if data.train_files is None:
        return _prompt_set(data, tokenizer, procedural.train_rows(data, seed)[: data.train_max_samples], _GYM)
    return _prompt_set(data, tokenizer, _file_rows(data, rewards, _TRAIN, data.train_max_samples), _TRAIN)


def build_val_set(data: DataConfig, rewards: Sequence[str], seed: int, tokenizer: Any) -> PromptSet | None:
    """The held-out prompts, or None if `data` names none; arguments and errors as of `build_train_set`."""
    if data.val_files is not None:
        return _prompt_set(data, tokenizer, _file_rows(data, rewards, _VAL, data.val_max_samples), _VAL)
    if data.train_files is not None:
        return None
    return _prompt_set(data, tokenizer, procedural.val_rows(data, seed)[: data.val_max_samples], _GYM)


def check_sources(data: DataConfig, rewards: Sequence[str], seed: int) -> None:
    """Find what can be found without a tokenizer: names, files, extensions, columns, a reward that does not fit.

    Reads one row of each local file. A Hub data set is loaded (and so downloaded once, before the ranks ask for it).
    Raises UserError.
    """
    for setting, value in ((_TRAIN, data.train_files), (_VAL, data.val_files)):
        if value is None:
            continue
        sources = resolve(setting, value, _split(setting))
        first_rows = [next(_read(data, rewards, [source]), None) for source in sources]
        if not any(first_rows):
            raise UserError(f"{setting}={value} has no rows. Name a data set with at least one prompt.")
    if data.train_files is None:
        procedural.make_dataset(data, seed, data.reasoning_gym.train_size)


def _split(setting: str) -> str:
    return "train" if setting == _TRAIN else "test"


def _prompt_set(data: DataConfig, tokenizer: Any, rows: list[Row], setting: str) -> PromptSet:
    return PromptSet(rows, tokenizer, data.max_prompt_length, data.overlong_prompts, setting)


def _file_rows(data: DataConfig, rewards: Sequence[str], setting: str, max_samples: int | None) -> list[Row]:
    value = data.train_files if setting == _TRAIN else data.val_files
    rows = list(islice(_read(data, rewards, resolve(setting, value, _split(setting))), max_samples))
    if not rows:
        raise UserError(f"{setting}={value} has no rows. Name a data set with at least one prompt.")
    return rows


def _read(data: DataConfig, rewards: Sequence[str], sources: list[Source]) -> Iterator[Row]:
    index = 0
    # A function of the user's and a reward model may judge without a reference answer; the named verifiers cannot.
    need_answer = not set(VERIFIERS).isdisjoint(rewards)
    for source in sources:
        for where, record in source.records(data.prompt_key, data.answer_key):
            row = parse_row(record, index, where, source.label, data.prompt_key, data.answer_key, need_answer)
            _check_reward_fits(rewards, row)
            yield row
            index += 1


def _check_reward_fits(rewards: Sequence[str], row: Row) -> None:
    if "reasoning_gym" not in rewards:
        return
    said = f"reward.functions={rewards}: reasoning_gym"
    if not row.data_source.startswith(procedural.PREFIX):
        raise UserError(
            f"{said} cannot score {row.where}: its data_source is {row.data_source!r}, not {procedural.PREFIX}<task>. "
            "Name math_verify, exact_match or file.py:name in its place."
        )
    procedural.check_task(row.data_source.removeprefix(procedural.PREFIX), f"{row.where}: data_source")
    missing = [key for key in ("question", "metadata") if key not in row.extra_info]
    if missing:
        raise UserError(f"{row.where}: {said} needs extra_info.{missing[0]} as the library made it. Add it.")
