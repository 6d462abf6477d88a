"""Checks the section `reward` without running any function, and finds the columns that the functions read."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.derived import needs_reward_model
from rlhf.config.schema.reward import REWARD_MODEL, VERIFIERS, RewardConfig
from rlhf.config.schema.reward_model import RewardModelConfig
from rlhf.config.user_functions import find_definition, likely_spec, split_spec
from rlhf.errors import UserError, did_you_mean, nearest
from rlhf.reward.signature import GIVEN, PROMPT, Convention, Signature

SETTING = "reward.functions"
NAMES = (*VERIFIERS, REWARD_MODEL)
# Metrics reward/<name> of every run, which no function's metric may replace.
OF_THE_BATCH = ("mean", "min", "max", "std", "frac_zero_std", "overlong", "timeouts", "failures")
RESERVED = (*OF_THE_BATCH, "kl", "kl_coef", "clip_frac", "norm_mean", "norm_std")


def label_of(function: str) -> str:
    """Return the metric name of an entry of `reward.functions`: the verifier's or function's name without a file."""
    return function if function in NAMES else split_spec(SETTING, function)[1]


def weights_of(config: RewardConfig) -> list[float]:
    return config.weights if config.weights is not None else [1.0] * len(config.functions)


def check_reward(config: RewardConfig, reward_model: RewardModelConfig, *, without_functions: bool = False) -> None:
    """Raise UserError for invalid settings in the section `reward`, and for a reward model without a path.

    `without_functions`: as in `check_functions`.
    """
    check_functions(config, without_functions=without_functions)
    if needs_reward_model(config) and reward_model.path is None:
        raise UserError(
            f"{SETTING}={config.functions}: {REWARD_MODEL} needs reward_model.path, a folder in Hugging "
            f"Face format or a Hub name. Set it, or remove {REWARD_MODEL}."
        )


def check_functions(config: RewardConfig, *, without_functions: bool = False) -> None:
    """Check the section `reward` as `check_reward` does, but not the reward model's path.

    `without_functions`: environments give the rewards, so `reward.functions` may be empty.
    """
    setting = f"{SETTING}={config.functions}"
    if not config.functions and not without_functions:
        raise UserError(f"{setting}: name at least one of {', '.join(NAMES)} or path/to/file.py:name.")
    for function in config.functions:
        if function in NAMES:
            continue
        if not (":" in function or "/" in function or function.endswith(".py")):  # `split_spec` checks all others
            raise UserError(
                f"{SETTING}: {function!r} is none of {', '.join(NAMES)}, and not of the form path/to/file.py:name."
                f"{did_you_mean(nearest(function, NAMES) or likely_spec(function))}"
            )
        signature = signature_in_file(function)
        if signature is not None and (problem := signature.problem()):
            raise UserError(f"{SETTING}={function}: the function {problem}")
    labels = [label_of(function) for function in config.functions]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise UserError(f"{setting}: two entries would both log reward/{label}. Rename or remove one.")
        if label in RESERVED:
            raise UserError(f"{setting}: the metric reward/{label} is reserved. Rename the function {label}.")
    _check_kwargs(config)
    _check_weights(config)
    _check_confinement(config)


def _check_confinement(config: RewardConfig) -> None:
    for name in config.pass_env:
        if name not in os.environ:
            raise UserError(f"reward.pass_env={config.pass_env}: {name} is not set. Set it, or remove it here.")
    for folder in config.writable:
        if not Path(folder).expanduser().is_dir():
            raise UserError(
                f"reward.writable={config.writable}: {folder} is not a folder. Create it, or remove it here."
            )


def _check_weights(config: RewardConfig) -> None:
    weights = weights_of(config)
    setting = f"reward.weights={weights}"
    if len(weights) != len(config.functions):
        raise UserError(
            f"{setting}: {len(weights)} for {len(config.functions)} functions ({', '.join(config.functions)}). "
            "Set one weight for each function, or null."
        )
    if not all(map(math.isfinite, weights)):
        raise UserError(f"{setting}: must be finite numbers.")
    if config.functions and not any(weights):
        raise UserError(f"{setting}: every reward would be 0. Give one of the functions another weight.")


def signature_in_file(spec: str) -> Signature | None:
    """Return the signature of the function `spec`; None if the file binds the name without a `def`, as by an import.

    Raise UserError if the file is missing or is not valid Python, or the name is not in it.
    """
    found = find_definition(SETTING, spec)
    return None if found is None else Signature.of_definition(found)


def _check_kwargs(config: RewardConfig) -> None:
    """Raise UserError for `reward.kwargs` that no function accepts, or that would replace the trainer's arguments."""
    signatures = [signature_in_file(function) for function in config.functions if function not in NAMES]
    known = [each for each in signatures if each is not None]
    for name in config.kwargs:
        kwarg = f"reward.kwargs={config.kwargs}: {name}"
        if any(name in (*GIVEN[each.convention], *each.renamed, PROMPT) for each in known):
            raise UserError(f"{kwarg} is an argument that the trainer passes. Use another name.")
        # The parameters of an imported function are unknown before its file runs.
        if None not in signatures and not any(each.accepts(name) for each in known):
            named = [parameter for each in known for parameter in each.named]
            near = did_you_mean(nearest(name, named))
            raise UserError(
                f"{kwarg} is not a parameter of any of reward.functions={config.functions}.{near} Correct it."
            )


@dataclass(frozen=True)
class WantedColumns:
    """Columns of the data that reward functions read, besides the prompt and the answer."""

    reads_all: bool = False
    """Whether a function reads all columns."""
    named: frozenset[str] = frozenset()
    required: tuple[tuple[str, str], ...] = ()
    """Columns without which a function cannot be called, each with the function."""

    @classmethod
    def of(cls, config: RewardConfig) -> "WantedColumns":
        reads_all, named, required = False, set[str](), list[tuple[str, str]]()
        for function in config.functions:
            if function in NAMES:
                continue
            signature = signature_in_file(function)
            if signature is None:
                reads_all = True
                continue
            trl = signature.convention is Convention.TRL
            reads_all = reads_all or (trl and signature.rest)
            named.update([PROMPT] * trl, signature.columns(config.kwargs))
            required += [(name, function) for name in signature.needs(config.kwargs)]
        return cls(reads_all, frozenset(named), tuple(required))

    def reads(self, name: str) -> bool:
        return self.reads_all or name in self.named

    def as_json(self) -> list[Any]:
        """Return everything that determines the columns of a row."""
        return [self.reads_all, sorted(self.named), sorted(name for name, _ in self.required)]

    def of_record(self, record: dict[str, Any], prompt_key: str, where: str) -> dict[str, Any]:
        """Return a record's columns for the functions.

        Raise UserError, naming `where`, if a required column is missing.
        """
        for name, function in self.required:
            if name not in record:
                raise UserError(
                    f"{where}: {SETTING}={function} takes {name}, but the row has no column {name}. Its columns: "
                    f"{', '.join(record) or 'none'}.{did_you_mean(nearest(name, record))} Rename a column to {name}, "
                    f"give the parameter {name} a default, or set it in reward.kwargs."
                )
        by_name = {name for name in record if self.reads(name) and (name != prompt_key or name in self.named)}
        found = {name: value for name, value in record.items() if name in by_name}
        if self.reads(PROMPT) and prompt_key in record:
            found[PROMPT] = record[prompt_key]
        return found
