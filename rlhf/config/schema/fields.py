"""Declaration of a setting: its default, its bounds, its choices, and what a change of it means for a resumed run."""

from dataclasses import field
from typing import Any, Literal

Resume = Literal["trajectory", "harmless", "start"]
"""Effect on a resume of a value other than the checkpoint's: `harmless` differences are logged, `trajectory` ones
change the numbers of the run and need `trainer.allow_config_change=true`; `start` ones say where a run begins and mean
nothing to one that goes on."""


def setting(
    default: Any,
    *,
    choices: tuple[str, ...] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    resume: Resume = "trajectory",
    by_device: bool = False,
) -> Any:
    """A dataclass field with its rules in the metadata; lists and dicts are copied per instance, sections are
    called.

    A `by_device` setting may be null, with which a composition begins: what suits the device (`rlhf.planning.suited`).
    Its default is for a CPU.
    """
    metadata = {"choices": choices, "ge": ge, "gt": gt, "le": le, "resume": resume, "by_device": by_device}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
