"""Compares a stored configuration with the current one, and finds the differences that change the run."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

import xxhash
import yaml
from omegaconf.errors import OmegaConfBaseException

from rlhf.config import Config
from rlhf.config.derived import needs_critic
from rlhf.config.known_settings import SETTINGS
from rlhf.config.overrides import hydra_value
from rlhf.config.resolved import from_stored, to_yaml
from rlhf.config.same_files import same_value
from rlhf.config.secrets import masked, secrets_of
from rlhf.errors import UserError

log = logging.getLogger(__name__)

TENSOR_SETTINGS = frozenset(
    f"model.lora.{name}" for name in ("enabled", "rank", "target_modules", "exclude_modules", "use_dora")
)
"""Settings that decide which tensors a run has. A checkpoint with other values lacks tensors that the run needs."""
# The length of a run affects its numbers only through a decaying learning rate.
RUN_LENGTH = ("trainer.total_epochs", "trainer.total_training_steps")
MODEL_NAMES = ("model.path", "model.revision", "critic.path", "reward_model.path", "reward_model.revision")
"""Settings that name models: a resume compares the models' files, not the names."""
KEPT_BY_NULL = ("backend.dp_replicate",)
"""Settings for which null means the checkpoint's value when a run resumes."""
OF_EVALUATIONS = ("data.val_files", "data.val_max_samples", "rollout.val_kwargs.")
"""Prefixes of settings that affect evaluations, but not training."""
NEW_RUN = (
    "give the new run a directory of its own with trainer.experiment_name=NAME (or trainer.default_local_dir=FOLDER), "
    "or start over in this one with trainer.overwrite=true"
)
SECRETS = (
    "Settings with secrets cannot be compared with the stored values: %s. If a secret has changed, the run's numbers "
    "may change."
)
"""Log line for the names from `not_compared`. No other message reports, for example, that a judge's URL now names
another model."""


@dataclass(frozen=True)
class Change:
    """One setting that differs, by its dotted key.

    `removed` is the release that removed the setting. Since then, every run acts as if the setting were `present`.
    """

    key: str
    stored: Any
    present: Any
    removed: str | None = None

    def __str__(self) -> str:
        note = f" (release {self.removed} removed the setting)" if self.removed else ""
        stored, present = (hydra_value(masked(value)) for value in (self.stored, self.present))
        return f"{self.key}: {stored} in the checkpoint, {present} now{note}"


@dataclass(frozen=True)
class ConfigDiff:
    """Settings that differ: `harmless` do not affect the run's numbers, `trajectory` do."""

    harmless: list[Change]
    trajectory: list[Change]


def compare(stored: Config, present: Config) -> ConfigDiff:
    """Divide the differing settings into harmless and trajectory, mainly by `resume` (`rlhf.config.schema.fields`)."""
    diff = ConfigDiff([], [])
    optimizers = [role.optim for config in (stored, present) for role in (config.actor, config.critic)]
    no_critic = not any(needs_critic(config.algorithm, config.critic) for config in (stored, present))
    constant_rate = all(optim.lr_scheduler_type == "constant" for optim in optimizers)
    for setting in (setting for setting in SETTINGS.values() if setting.metadata["resume"] != "start"):
        change = Change(setting.key, setting.value(stored), setting.value(present))
        keeps = setting.key in KEPT_BY_NULL and change.present is None
        same = keeps or same_value(setting.key, change.stored, change.present)
        if same or masked(change.stored) == masked(change.present):
            continue
        harmless = setting.metadata["resume"] == "harmless" or (constant_rate and setting.key in RUN_LENGTH)
        harmless = harmless or (no_critic and setting.key.startswith("critic.") and setting.key != "critic.enable")
        (diff.harmless if harmless else diff.trajectory).append(change)
    return diff


def compare_text(stored: str, present: Config, release: str | None = None) -> ConfigDiff:
    """Compare a configuration that `release` stored as YAML with `present`; see `compare`.

    Raises:
        UserError: the stored configuration does not fit the schema after all migrations.
    """
    try:
        config, lost = from_stored(stored, release)
        diff = compare(config, present)
        removed = [Change(each.setting.key, each.stored, each.setting.acts_as, each.release) for each in lost]
        return ConfigDiff(diff.harmless, diff.trajectory + removed)
    except OmegaConfBaseException as error:
        raise UserError(
            f"the checkpoint's settings do not fit this version of rlhf ({str(error).splitlines()[0]}). Resume with "
            f"the version that wrote the checkpoint, or {NEW_RUN}."
        ) from error


@dataclass(frozen=True)
class ResolvedConfig:
    """The whole configuration as text, for code that stores or compares it without reading its sections.

    `compare` receives a stored text and the release that wrote it. `not_compared` holds `not_compared(config)`.
    """

    text: str
    compare: Callable[[str, str | None], ConfigDiff]
    not_compared: Sequence[str] = ()

    @classmethod
    def of(cls, config: Config) -> "ResolvedConfig":
        return cls(to_yaml(config), lambda stored, release: compare_text(stored, config, release), not_compared(config))

    @property
    def hash(self) -> str:
        """Return the xxh3-128 of the text in hex, which manifests record."""
        return xxhash.xxh3_128_hexdigest(self.text.encode())

    def setting(self, key: str) -> Any:
        """Return the value of the setting `key`, for messages."""
        return reduce(getitem, key.split("."), yaml.safe_load(self.text))


def trajectory(config: Config) -> dict[str, Any]:
    """Return the settings that the run's numbers depend on, by their dotted names."""
    return {s.key: masked(s.value(config)) for s in SETTINGS.values() if s.metadata["resume"] == "trajectory"}


def not_compared(config: Config) -> list[str]:
    """Return the names of secrets in settings that the run's numbers depend on: `compare` cannot see their changes."""
    settings = (s for s in SETTINGS.values() if s.metadata["resume"] == "trajectory")
    return [name for s in settings for name, _ in secrets_of(s.value(config), s.key)]


def reject_changes(diff: ConfigDiff, *, allow: bool, begins: bool = False) -> None:
    """Raise UserError if a setting changes the run's trajectory, unless `allow` (`trainer.allow_config_change`).

    A run that `begins` at the checkpoint (`trainer.resume_mode=resume_path`) is a new run already, so the message does
    not suggest another directory.
    """
    if allow or not diff.trajectory:
        return
    removed = [change.key for change in diff.trajectory if change.removed is not None]
    present = {change.key for change in diff.trajectory} - set(removed)
    tensor_settings = sorted(TENSOR_SETTINGS & present)
    by_device = [key for key in SETTINGS if key in present and SETTINGS[key].metadata["by_device"]]
    message = (
        f"settings that the run's numbers depend on differ from the checkpoint's:\n{as_lines(diff.trajectory)}\n"
        "Restore the checkpoint's values to continue its run"
    )
    if removed:
        message += f" with the release that saved the checkpoint: newer releases lack {', '.join(removed)}"
    if not tensor_settings:
        message += ", or set trainer.allow_config_change=true to continue with the new values"
    message += "." if begins else f"; or {NEW_RUN}."
    if tensor_settings:
        message += f" The checkpoint lacks tensors for the new {' and '.join(tensor_settings)}."
    if by_device:
        message += f" The device may have changed; it sets the defaults of {', '.join(by_device)}."
    raise UserError(message)


def log_changes(diff: ConfigDiff) -> None:
    """Log each difference, and whether the resumed run's numbers depend on it."""
    for change in diff.harmless:
        log.info("resume: changed setting that does not affect the run's numbers: %s", change)
    for change in diff.trajectory:
        log.warning("resume: changed setting that affects the run's numbers: %s", change)


def as_lines(changes: list[Change]) -> str:
    return "\n".join(f"  {change}" for change in changes)
