"""Builds prompt sets from the `data` settings, and checks the sources before models load."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from itertools import islice
from typing import Any

from rlhf import typed_json
from rlhf.config import DataConfig, EnvConfig, RewardConfig
from rlhf.config.schema.reward import VERIFIERS
from rlhf.data import procedural
from rlhf.data.cached_prompts import cached_prompts, is_large, tokenizer_identity
from rlhf.data.custom import CustomRecord, check_custom, custom_records
from rlhf.data.items import Row
from rlhf.data.prompt_cache import cache_folder
from rlhf.data.prompt_file import NotPlain
from rlhf.data.prompts import PromptSet
from rlhf.data.records import Source, resolve
from rlhf.data.rows import parse_row, with_last_turn_as_answer, with_system_prompt
from rlhf.data.tokens import LengthLimit
from rlhf.environments.class_checks import check_reset, check_row, reset_arguments
from rlhf.errors import UserError
from rlhf.reward import WantedColumns
from rlhf.reward.code_tests import FORMS, read_tests
from rlhf.reward.signature import PROMPT

log = logging.getLogger(__name__)

NO_ENVIRONMENTS = EnvConfig()
EARLY_CHECK_S = 0.7
"""Before models load, check rows of a set for at most this many seconds. Later the ranks check all rows."""

_TRAIN, _VAL, _GYM = "data.train_files", "data.val_files", "data.reasoning_gym"


def build_train_set(
    data: DataConfig,
    reward: RewardConfig,
    seed: int,
    tokenizer: Any,
    day: date | None = None,
    env: EnvConfig = NO_ENVIRONMENTS,
) -> PromptSet:
    """Return the tokenized training prompts.

    Args:
        reward: its functions decide whether rows need an answer, and which other columns rows need.
        seed: `trainer.seed`, for generated problems.
        day: the day that chat templates print; None: today.
        env: with environments, rows keep all columns, and need the columns that `reset` has as parameters.

    Raises:
        UserError: any error in settings or data.
    """
    if data.train_files is None:
        rows = procedural.train_rows(data, seed)[: data.train_max_samples]
        return _gym_set(data, reward, tokenizer, rows, _limit(data, _GYM, day))
    return _file_set(data, reward, _limit(data, _TRAIN, day), data.train_max_samples, tokenizer, seed, env)


def build_val_set(
    data: DataConfig,
    reward: RewardConfig,
    seed: int,
    tokenizer: Any,
    day: date | None = None,
    env: EnvConfig = NO_ENVIRONMENTS,
) -> PromptSet | None:
    """Return the held-out prompts, or None if `data` has none. Arguments and errors are as in `build_train_set`."""
    if data.val_files is not None:
        return _file_set(data, reward, _limit(data, _VAL, day), data.val_max_samples, tokenizer, seed, env)
    if data.train_files is not None:
        return None
    rows = procedural.val_rows(data, seed)[: data.val_max_samples]
    return _gym_set(data, reward, tokenizer, rows, _limit(data, _GYM, day))


def check_sources(data: DataConfig, reward: RewardConfig, seed: int, env: EnvConfig = NO_ENVIRONMENTS) -> Row | None:
    """Check names, files, extensions, columns and rewards without a tokenizer, and return the first row of the files.

    Without files, return the first generated problem. With `data.custom_cls`, return None, because only the ranks run
    its code.

    Reads one row of each source, then rows of local files for up to EARLY_CHECK_S seconds. Loads a Hub dataset, so that
    it is downloaded once, before the ranks need it.

    Raises:
        UserError: any error that is found.
    """
    firsts: list[Row] = []
    wanted = ((_TRAIN, data.train_files, data.train_max_samples), (_VAL, data.val_files, data.val_max_samples))
    for setting, value, max_samples in wanted:
        if value is None:
            continue
        sources = resolve(setting, value, _split(setting), any_file=data.custom_cls.spec is not None)
        if data.custom_cls.spec is not None:
            check_custom(data.custom_cls.spec)
            continue
        first_rows = [next(_read(data, reward, env, [source]), None) for source in sources]
        if not any(first_rows):
            raise UserError(f"{setting}={value} has no rows. Name a data set with at least one prompt.")
        firsts += [row for row in first_rows if row is not None]
        end = time.monotonic() + EARLY_CHECK_S
        local = all(source.path is not None for source in sources)
        for _ in islice(_read(data, reward, env, sources), max_samples) if local else ():
            if time.monotonic() > end:
                break
    if data.train_files is None and data.val_files is None:
        row = procedural.first_row(data, seed)
        _wanted(reward, env).of_record({}, data.prompt_key, row.where)
        check_row(env, {}, row.where)
        check_reset(env, reset_arguments(env), {}, row.extra_info, row.where)
        return with_system_prompt(row, data.system_prompt)
    return firsts[0] if firsts else None


def _split(setting: str) -> str:
    return "train" if setting == _TRAIN else "test"


def _gym_set(data: DataConfig, reward: RewardConfig, tokenizer: Any, rows: list[Row], limit: LengthLimit) -> PromptSet:
    if rows:
        WantedColumns.of(reward).of_record({}, data.prompt_key, rows[0].where)
    rows = [with_system_prompt(row, data.system_prompt) for row in rows]
    return PromptSet.in_memory(rows, tokenizer, limit)


def _limit(data: DataConfig, setting: str, day: date | None) -> LengthLimit:
    variables = data.apply_chat_template_kwargs
    return LengthLimit(data.max_prompt_length, data.overlong_prompts, setting, variables, day or date.today())


def _file_set(
    data: DataConfig,
    reward: RewardConfig,
    limit: LengthLimit,
    max_samples: int | None,
    tokenizer: Any,
    seed: int,
    env: EnvConfig,
) -> PromptSet:
    setting = limit.setting
    value = data.train_files if setting == _TRAIN else data.val_files
    custom = data.custom_cls.spec is not None
    sources = resolve(setting, value, _split(setting), any_file=custom)
    if not custom and is_large(sources) and (tokens := tokenizer_identity(tokenizer, limit.day)) is not None:
        # Cached rows depend on the release of reasoning-gym only if its verifier has checked the rows.
        verifier = version("reasoning-gym") if "reasoning_gym" in reward.functions else None
        other_inputs: list[Any] = [tokens, data.prompt_key, data.answer_key, max_samples]
        other_inputs += [_need_answer(reward.functions), verifier, _wanted(reward, env).as_json()]
        needed = [f"{label} {name}" for label, reset in reset_arguments(env).items() for name in reset.needed]
        other_inputs += [[*env.classes, *needed]]
        other_inputs += [data.system_prompt, data.apply_chat_template_kwargs, data.last_turn_as_answer]

        def read() -> Iterator[Row]:
            return islice(_read(data, reward, env, sources), max_samples)

        try:
            folder = cache_folder(data.cache_dir)
            return PromptSet(cached_prompts(folder, sources, read, tokenizer, limit, other_inputs), limit)
        except NotPlain as error:
            log.warning("%s, so every rank stores all prompts of %s in its own memory.", error, setting)
    if custom:  # do not cache, because the result may depend on anything that the user's code reads
        rows = list(_rows(data, reward, env, custom_records(data, sources, tokenizer, seed, max_samples)))
    else:
        rows = list(islice(_read(data, reward, env, sources), max_samples))
    if not rows:
        raise UserError(f"{setting}={value} has no rows. Name a data set with at least one prompt.")
    return PromptSet.in_memory(rows, tokenizer, limit)


def _read(data: DataConfig, reward: RewardConfig, env: EnvConfig, sources: list[Source]) -> Iterator[Row]:
    wanted = _wanted(reward, env)
    of_sources = ((source.label, source.records(data.prompt_key, data.answer_key, wanted)) for source in sources)
    yield from _rows(data, reward, env, ((label, *found) for label, records in of_sources for found in records))


def _wanted(reward: RewardConfig, env: EnvConfig) -> WantedColumns:
    wanted = WantedColumns.of(reward)
    if not env.used:
        return wanted
    # `prompt` keeps its place as the last column: the order is a part of the prompts' fingerprint.
    named = [name for reset in reset_arguments(env).values() for name in reset.named if name != PROMPT]
    return replace(wanted, reads_all=True, named=wanted.named.union(named))


def _rows(data: DataConfig, reward: RewardConfig, env: EnvConfig, records: Iterable[CustomRecord]) -> Iterator[Row]:
    rewards, wanted, need_answer = reward.functions, _wanted(reward, env), _need_answer(reward.functions)
    resets = reset_arguments(env)
    for index, (label, where, given) in enumerate(records):
        if deep := next((name for name, value in given.items() if typed_json.is_deep(value)), None):
            raise UserError(
                f"{where}: column {deep!r} has over {typed_json.MOST_LEVELS} levels of lists and mappings, which "
                "reward processes cannot receive. Flatten it, or store it as a JSON text."
            )
        record = with_last_turn_as_answer(given, where, data) if data.last_turn_as_answer else given
        row = parse_row(record, index, where, label, data, need_answer)
        _check_reward_fits(rewards, row)
        check_row(env, record, where)
        check_reset(env, resets, record, row.extra_info, where)
        row = replace(row, columns=wanted.of_record(record, data.prompt_key, where))
        yield with_system_prompt(row, data.system_prompt)


def _need_answer(rewards: Sequence[str]) -> bool:
    # User functions and reward models can score without a reference answer; the named verifiers cannot.
    return not set(VERIFIERS).isdisjoint(rewards)


def _check_reward_fits(rewards: Sequence[str], row: Row) -> None:
    comparing = [name for name in ("math_verify", "exact_match") if name in rewards]
    if comparing and isinstance(row.ground_truth, dict):
        raise UserError(
            f"{row.where}: the reference answer is a mapping with {', '.join(map(str, row.ground_truth))}, and "
            f"{comparing[0]} of reward.functions compares texts. Set data.answer_key to a column with only the "
            "answer, or use your own reward function."
        )
    if "code_tests" in rewards:
        try:
            read_tests(row.ground_truth)
        except ValueError as error:
            raise UserError(
                f"{row.where}: code_tests of reward.functions cannot read the tests in the answer: {error}. It reads "
                f"{FORMS}."
            ) from None
    if "reasoning_gym" not in rewards:
        return
    shown = f"reward.functions={rewards}: reasoning_gym"
    if not row.data_source.startswith(procedural.PREFIX):
        raise UserError(
            f"{shown} cannot score {row.where}: its data_source is {row.data_source!r}, not {procedural.PREFIX}<task>. "
            "Use math_verify, exact_match or file.py:name instead."
        )
    procedural.check_task(row.data_source.removeprefix(procedural.PREFIX), f"{row.where}: data_source")
    missing = [key for key in ("question", "metadata") if key not in row.extra_info]
    if missing:
        raise UserError(f"{row.where}: {shown} needs extra_info.{missing[0]} as reasoning-gym generates it. Add it.")
