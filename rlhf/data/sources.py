"""From the `data` settings to prompt sets, and the first steps of that road alone, to find mistakes early."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from rlhf.config import Config
from rlhf.config.reward import VERIFIERS
from rlhf.data import procedural
from rlhf.data.items import Row
from rlhf.data.prompts import PromptSet
from rlhf.data.records import Source, resolve
from rlhf.data.rows import parse_row
from rlhf.errors import UserError


def build_train_set(config: Config, tokenizer: Any) -> PromptSet:
    """The training prompts of the configuration, tokenised; UserError for any mistake in settings or data."""
    data = config.data
    if data.train_files is None:
        return _prompt_set(
            config, tokenizer, procedural.train_rows(config)[: data.train_max_samples], "data.reasoning_gym"
        )
    return _prompt_set(
        config, tokenizer, _file_rows(config, "data.train_files", data.train_max_samples), "data.train_files"
    )


def build_val_set(config: Config, tokenizer: Any) -> PromptSet | None:
    """The held-out prompts, or None if the configuration names none; UserError as `build_train_set`."""
    data = config.data
    if data.val_files is not None:
        return _prompt_set(
            config, tokenizer, _file_rows(config, "data.val_files", data.val_max_samples), "data.val_files"
        )
    if data.train_files is not None:
        return None
    return _prompt_set(config, tokenizer, procedural.val_rows(config)[: data.val_max_samples], "data.reasoning_gym")


def check_sources(config: Config) -> None:
    """Find what can be found without a tokenizer: names, files, extensions, columns, a reward that does not fit.

    Reads one row of each local file. A Hub data set is loaded (and so downloaded once, before the ranks ask for it).
    Raises UserError.
    """
    for setting, value in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        if value is None:
            continue
        first_rows = [next(_read(config, [source]), None) for source in resolve(setting, value, _split(setting))]
        if not any(first_rows):
            raise UserError(f"{setting}={value} has no rows. Name a data set with at least one prompt.")
    if config.data.train_files is None:
        gym = config.data.reasoning_gym
        procedural.make_dataset(config, config.trainer.seed, gym.train_size)


def _split(setting: str) -> str:
    return "train" if setting == "data.train_files" else "test"


def _prompt_set(config: Config, tokenizer: Any, rows: list[Row], setting: str) -> PromptSet:
    return PromptSet(rows, tokenizer, config.data.max_prompt_length, config.data.overlong_prompts, setting)


def _file_rows(config: Config, setting: str, max_samples: int | None) -> list[Row]:
    value = config.data.train_files if setting == "data.train_files" else config.data.val_files
    rows = list(islice(_read(config, resolve(setting, value, _split(setting))), max_samples))
    if not rows:
        raise UserError(f"{setting}={value} has no rows. Name a data set with at least one prompt.")
    return rows


def _read(config: Config, sources: list[Source]) -> Iterator[Row]:
    data, index = config.data, 0
    # A function of the user's and a reward model may judge without a reference answer; the named verifiers cannot.
    need_answer = not set(VERIFIERS).isdisjoint(config.reward.functions)
    for source in sources:
        for where, record in source.records(data.prompt_key, data.answer_key):
            row = parse_row(record, index, where, source.label, data.prompt_key, data.answer_key, need_answer)
            _check_reward_fits(config, row)
            yield row
            index += 1


def _check_reward_fits(config: Config, row: Row) -> None:
    if "reasoning_gym" not in config.reward.functions:
        return
    said = f"reward.functions={config.reward.functions}: reasoning_gym"
    if not row.data_source.startswith(procedural.PREFIX):
        raise UserError(
            f"{said} cannot score {row.where}: its data_source is {row.data_source!r}, not {procedural.PREFIX}<task>. "
            "Name math_verify, exact_match or file.py:name in its place."
        )
    procedural.check_task(row.data_source.removeprefix(procedural.PREFIX), f"{row.where}: data_source")
    missing = [key for key in ("question", "metadata") if key not in row.extra_info]
    if missing:
        raise UserError(f"{row.where}: {said} needs extra_info.{missing[0]} as the library made it. Add it.")
