"""Reads the inputs of a run before any weights are loaded: the models' files, the prompts, the number of steps."""

from dataclasses import dataclass
from datetime import date

from transformers import PreTrainedTokenizerBase

from rlhf.assemble.model_sources import ModelSources
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.config import DataConfig, EnvConfig, RewardConfig
from rlhf.data import PromptSet, PromptStream, build_train_set, build_val_set
from rlhf.data.answers import warn_of_numbers
from rlhf.data.repeats import warn_of_repeats
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator


@dataclass(frozen=True)
class RunInputs:
    """The checked inputs of a run."""

    models: ModelSources
    train_set: PromptSet
    val_set: PromptSet | None
    stream: PromptStream
    driver: DriverState
    day: date
    """The day that chat templates print."""

    @property
    def fingerprints(self) -> dict[str, str]:
        return self.models.fingerprints | {
            "prompts": f"{self.train_set.fingerprint} {self.train_set.tokens_fingerprint}"
        }


def read_prompts(
    data: DataConfig,
    reward: RewardConfig,
    env: EnvConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    day: date,
    coordinator: Coordinator,
) -> tuple[PromptSet, PromptSet | None]:
    """Return the training prompts and the held-out prompts, if any, with `day` as chat templates' date. Collective.

    Raises:
        UserError: the data has an error, or the ranks read different prompts or tokenize them differently.
    """
    train_set = build_train_set(data, reward, seed, tokenizer, day, env)
    _check_same(train_set, f"training prompts from {data.train_files or data.reasoning_gym}", coordinator)
    val_set = read_held_out_prompts(data, reward, env, seed, tokenizer, day, coordinator)
    if data.train_files is not None and coordinator.rank == 0:
        if not env.used:  # rows with equal prompts may give an environment other columns
            warn_of_repeats(train_set, val_set)
        warn_of_numbers(train_set, "data.train_files", reward.functions)
    return train_set, val_set


def read_held_out_prompts(
    data: DataConfig,
    reward: RewardConfig,
    env: EnvConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    day: date,
    coordinator: Coordinator,
) -> PromptSet | None:
    """Return the held-out prompts, if any; arguments and errors as `read_prompts`. Collective."""
    val_set = build_val_set(data, reward, seed, tokenizer, day, env)
    if val_set is not None:
        # Each rank evaluates every n-th prompt. If the ranks had different prompts or orders, metrics would be wrong.
        _check_same(val_set, f"held-out prompts from {data.val_files or data.reasoning_gym}", coordinator)
        if data.val_files is not None and coordinator.rank == 0:
            warn_of_numbers(val_set, "data.val_files", reward.functions)
    return val_set


def _check_same(prompts: PromptSet, what: str, coordinator: Coordinator) -> None:
    if len(set(coordinator.all_gather(prompts.fingerprint))) > 1:
        raise UserError(
            f"The ranks read different {what}: give every node the same files, and set PYTHONHASHSEED=0 for all ranks "
            "(some reasoning-gym tasks depend on it; the supervisor of python -m rlhf.train sets it). The code of "
            "data.custom_cls must make the same rows on all ranks."
        )
    if len(set(coordinator.all_gather(prompts.tokens_fingerprint))) > 1:
        raise UserError(
            f"The ranks tokenize the same {what} differently: give every node the same tokenizer, chat template "
            "(model.path, model.chat_template) and release of transformers."
        )
