"""Generates problems with the reasoning-gym library from the run's seed, without files or downloads."""

import dataclasses
from typing import Any

from rlhf.config import DataConfig
from rlhf.data.items import Row
from rlhf.data.rows import listed, suggestion
from rlhf.errors import UserError

PREFIX = "reasoning_gym/"
VAL_SEED_OFFSET = 10_000_019


def check_task(task: str, setting: str) -> None:
    """Raise UserError with the nearest names if reasoning-gym has no task of this name."""
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UserError(
            f"{setting}={task}: reasoning-gym has no task of this name.{suggestion(task, DATASETS)} Set one of "
            f"{listed(sorted(DATASETS))}."
        )


def make_dataset(data: DataConfig, seed: int, size: int) -> Any:
    """Return a reasoning-gym dataset of `size` problems. Raise UserError for an unknown task or wrong settings."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    task, settings = data.reasoning_gym.task, dict(data.reasoning_gym.config)
    check_task(task, "data.reasoning_gym.task")
    choices = [f.name for f in dataclasses.fields(DATASETS[task][1]) if f.name not in ("seed", "size")]
    for key in settings:
        if key in ("seed", "size"):
            raise UserError(
                f"data.reasoning_gym.config.{key} cannot be set. Set trainer.seed, data.reasoning_gym.train_size or "
                "data.reasoning_gym.val_size instead."
            )
        if key not in choices:
            raise UserError(
                f"data.reasoning_gym.config.{key}: {task} has no setting of this name.{suggestion(str(key), choices)} "
                f"Set one of {listed(choices)}."
            )
    try:
        return create_dataset(task, seed=seed, size=size, **settings)
    except (AssertionError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"data.reasoning_gym.config={settings}: {task} rejects these values: {error}. Correct them."
        ) from error


def first_row(data: DataConfig, seed: int) -> Row:
    """Return the first training problem. Raises UserError like `make_dataset`."""
    return _rows(data, [make_dataset(data, seed, data.reasoning_gym.train_size)[0]])[0]


def val_rows(data: DataConfig, seed: int) -> list[Row]:
    """Return the held-out problems of the run with this `trainer.seed`."""
    return _rows(data, make_dataset(data, VAL_SEED_OFFSET + seed, data.reasoning_gym.val_size))


def train_rows(data: DataConfig, seed: int) -> list[Row]:
    """Return the training problems without held-out questions. Repeated questions stay, as the task generates them.

    Raise UserError if no problem is left.
    """
    gym = data.reasoning_gym
    held_out = {row.extra_info["question"] for row in val_rows(data, seed)}
    rows = _rows(data, make_dataset(data, seed, gym.train_size))
    kept = [row for row in rows if row.extra_info["question"] not in held_out]
    if not kept:
        raise UserError(
            f"data.reasoning_gym.val_size={gym.val_size}: the held-out problems cover all {gym.train_size} training "
            f"problems of {gym.task}. Set a smaller val_size, a larger train_size, or a richer config."
        )
    return kept


def _rows(data: DataConfig, dataset: Any) -> list[Row]:
    task, settings = data.reasoning_gym.task, dict(data.reasoning_gym.config)
    return [
        Row(
            index=index,
            where=f"data.reasoning_gym: {task} problem {index}",
            messages=[{"role": "user", "content": entry["question"]}],
            data_source=PREFIX + task,
            ground_truth=entry["answer"],
            # Inputs of `score_answer` besides the answer, and the settings that a few tasks' scoring reads.
            extra_info={"question": entry["question"], "metadata": entry["metadata"], "config": settings},
        )
        for index, entry in enumerate(dataset)
    ]
