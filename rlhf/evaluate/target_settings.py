"""Composes the configuration of each evaluation: the stored settings of a run, then the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from rlhf.compose import Composition, composition
from rlhf.config import Config, LoraConfig, RolloutConfig
from rlhf.config.known_settings import SETTINGS
from rlhf.config.library import Library
from rlhf.config.overrides import hydra_value
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from rlhf.evaluate.consent import consent_needed, drop_training_code, take_settings_to_confirm, unconfirmed
from rlhf.evaluate.targets import EvaluationTarget

EVALUATIONS = "evaluations"
DEFAULT_NAME = "default"
STEPS_LEFT = 1_000_000
"""`trainer.total_training_steps` of an evaluation is this number plus the target's step. An evaluation trains no step,
but the total must be longer than any stored warm-up."""
NAMED_BY_TARGETS = {"model.path", "trainer.resume_mode", "trainer.resume_from_path"}
RECIPE = "recipes=minimal"
"""The override that selects a recipe for a model, if the command names neither a run nor a recipe."""


@dataclass(frozen=True)
class PlannedEvaluation:
    """One target with the configuration of its evaluation."""

    target: EvaluationTarget
    config: Config
    again: bool
    """Whether to evaluate again and replace a stored result (`trainer.overwrite`)."""


@dataclass(frozen=True)
class StoredSettings:
    """The settings of a run that may be the defaults of an evaluation."""

    name: str
    tree: DictConfig
    to_confirm: Mapping[str, Any]
    """Stored values that need the user's consent. In `tree` they are missing."""

    @classmethod
    def of(cls, target: EvaluationTarget, trusts_settings: bool) -> Self | None:
        """Return the settings of the target's run; None without a run."""
        if (tree := target.stored_settings()) is None:
            return None
        unused = _own_settings(target).keys()
        to_confirm = {} if trusts_settings else take_settings_to_confirm(tree, unused)
        drop_training_code(tree)
        return cls(target.name, tree, to_confirm)


def plan(
    targets: Sequence[EvaluationTarget], overrides: Sequence[str], library: Library, *, trusts_settings: bool = False
) -> list[PlannedEvaluation]:
    """Return the evaluation of each target. Raise UserError with the mistakes of all targets at once.

    A run's stored settings are the defaults of its checkpoints. The settings of the first run are also the defaults of
    models, so that a base model is evaluated like the run that started from it. `trusts_settings` is the user's consent
    to stored settings that name code (`rlhf.evaluate.consent`).
    """
    stored = [StoredSettings.of(target, trusts_settings) for target in targets]
    first_run = next((settings for settings in stored if settings is not None), None)
    planned, problems = [], []
    for target, own in zip(targets, stored, strict=True):
        try:
            planned.append(_planned(target, own or first_run, list(overrides), library))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return planned


def _planned(
    target: EvaluationTarget, stored: StoredSettings | None, overrides: list[str], library: Library
) -> PlannedEvaluation:
    composed = _composed(target, None if stored is None else stored.tree, overrides, library)
    tree, typed = composed.tree, dict(composed.typed)
    if stored is not None and (found := unconfirmed(tree, typed, stored.to_confirm)):
        raise UserError(consent_needed(stored.name, found))
    own = _own_settings(target)
    for key in sorted(own.keys() & typed.keys() & NAMED_BY_TARGETS):
        raise UserError(
            f"{key}={hydra_value(typed[key])}: targets name the models and checkpoints of an evaluation. Remove the "
            "setting, and give its value as a target."
        )
    if lines := [
        f"{key}={hydra_value(value)}: has no effect on an evaluation; set {of_evaluation}={hydra_value(value)}."
        for key, value in composed.typed
        if (of_evaluation := key.replace("rollout.", "rollout.val_kwargs.", 1)) in SETTINGS and key != of_evaluation
    ]:
        raise UserError("\n".join(lines))
    again = bool(typed.get("trainer.overwrite"))  # ignore the stored value, which was about the training run
    data, trainer = tree.data, tree.trainer
    if data.val_files is None and (OmegaConf.is_missing(data, "train_files") or data.train_files is not None):
        raise UserError("data.val_files is not set: an evaluation needs held-out prompts. Add data.val_files=FILE.")
    parent = Path(trainer.default_local_dir).expanduser().absolute() / EVALUATIONS
    own |= {
        "data.train_files": None,
        "trainer.default_local_dir": str(parent),
        "trainer.project_name": typed.get("trainer.experiment_name", DEFAULT_NAME),
        "trainer.experiment_name": target.slug,
        "trainer.overwrite": False,
    }
    for key, value in own.items():
        OmegaConf.update(tree, key, value, merge=False)
    config = composed.resolved()
    validate(config)
    return PlannedEvaluation(target, config, again)


def _composed(
    target: EvaluationTarget, stored: DictConfig | None, overrides: list[str], library: Library
) -> Composition:
    if stored is None:
        recipe = [] if any(text.startswith("recipes=") for text in overrides) else [RECIPE]
        return composition([*recipe, *overrides], library)
    tree = stored.copy()
    OmegaConf.update(tree, "backend.dp_replicate", None)  # an evaluation may have more or fewer ranks
    if target.checkpoint is None:  # the run's adapters do not fit another model
        OmegaConf.update(tree, "model.lora", OmegaConf.structured(LoraConfig), merge=False)
        OmegaConf.update(tree, "rollout.lora", RolloutConfig().lora)
        OmegaConf.update(tree, "model.revision", None)
    return composition(overrides, library, stored=tree)


def _own_settings(target: EvaluationTarget) -> dict[str, Any]:
    """Return the settings whose values an evaluation of the target fixes, such as the checkpoint to start from."""
    starts = target.checkpoint is not None
    settings: dict[str, Any] = {
        "trainer.resume_mode": "resume_path" if starts else "auto",
        "trainer.resume_from_path": str(target.checkpoint) if starts else None,
        "trainer.allow_config_change": True,
        "trainer.total_training_steps": target.step + STEPS_LEFT,
        "trainer.logger": [],
        "trainer.callbacks": [],
        "trainer.callback_kwargs": {},
        "checkpoint.remote": None,
        "checkpoint.memory.replicas": 0,
    }
    if target.model is not None:
        settings["model.path"] = target.model
    return settings
