"""Declares a setting: default, bounds, choices, and the effect of a change on a resume."""

from dataclasses import field
from typing import Any, Literal

Resume = Literal["trajectory", "harmless", "start"]
"""Effect of a value that differs from the checkpoint's. A resume logs `harmless` differences. `trajectory` differences
change the numbers of the run and need `trainer.allow_config_change=true`. `start` settings choose where a run begins,
and a resume ignores them."""


def setting(
    default: Any,
    *,
    choices: tuple[str, ...] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    resume: Resume = "trajectory",
    by_device: bool = False,
    secret: bool = False,
) -> Any:
    """Return a dataclass field with its rules in the metadata.

    A list or dict default is copied for each instance; a callable default, such as a section's class, is called. A
    `by_device` setting may be null in a recipe: composition replaces null by the device's default
    (`rlhf.planning.device_defaults`), and `default` is the value for CPUs. The whole text of a `secret` setting is
    hidden (`rlhf.config.secrets`).
    """
    metadata = {"choices": choices, "ge": ge, "gt": gt, "le": le, "resume": resume, "by_device": by_device}
    metadata["secret"] = secret
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
