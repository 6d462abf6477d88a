"""A stored configuration against the present one: which differences a resume may ignore and which change the run."""

import logging
from dataclasses import dataclass
from typing import Any

from rlhf.config import Config
from rlhf.config.schema import SETTINGS
from rlhf.errors import UserError

log = logging.getLogger(__name__)

# The length of the run reaches the numbers only through a learning rate that decays towards its end.
_RUN_LENGTH = ("trainer.total_epochs", "trainer.total_training_steps")


@dataclass(frozen=True)
class Change:
    """One setting that differs: its dotted key and both values."""

    key: str
    stored: Any
    present: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.stored!r} in the checkpoint, {self.present!r} now"


@dataclass(frozen=True)
class ConfigDiff:
    """The differences, by what they mean for the numbers of the resumed run."""

    harmless: list[Change]
    trajectory: list[Change]


def compare(stored: Config, present: Config) -> ConfigDiff:
    """Sort the settings that differ by their `resume` rule (see `rlhf.config.fields`)."""
    diff = ConfigDiff([], [])
    optimizers = [role.optim for config in (stored, present) for role in (config.actor, config.critic)]
    constant_rate = all(optim.lr_scheduler_type == "constant" for optim in optimizers)
    for setting in SETTINGS.values():
        change = Change(setting.key, setting.value(stored), setting.value(present))
        if change.stored == change.present:
            continue
        harmless = setting.metadata["resume"] == "harmless" or (constant_rate and setting.key in _RUN_LENGTH)
        (diff.harmless if harmless else diff.trajectory).append(change)
    return diff


def check_resume(stored: Config, present: Config) -> None:
    """Log the harmless differences; refuse the others unless `trainer.allow_config_change` is true.

    Raises:
        UserError: naming every setting that would change the run, with both values and the two remedies.
    """
    diff = compare(stored, present)
    for change in diff.harmless:
        log.info("resume: setting changed, the run's numbers do not depend on it: %s", change)
    if not diff.trajectory:
        return
    if not present.trainer.allow_config_change:
        changes = "\n".join(f"  {change}" for change in diff.trajectory)
        raise UserError(
            f"the checkpoint was written with settings that give another run:\n{changes}\n"
            "Restore these values to continue that run, or set trainer.allow_config_change=true to use the new ones."
        )
    for change in diff.trajectory:
        log.warning("resume: setting changed, the run departs from the stored one: %s", change)
