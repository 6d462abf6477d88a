"""Reports settings that have no effect because of another setting's value."""

from collections.abc import Iterable, Iterator

from rlhf.config import Config
from rlhf.config.known_settings import SETTINGS
from rlhf.config.overrides import hydra_value
from rlhf.config.secrets import masked


def without_effect(
    config: Config, keys: Iterable[str], needs: str, now: object = None, remedy: str = ""
) -> Iterator[str]:
    """Yield one line per setting in `keys` that differs from its default and has no effect without `needs`.

    Args:
        needs: the setting and its value, or another condition.
        now: the present value of the setting in `needs`, for the message.
        remedy: the change that the line proposes; by default `needs`.
    """
    present = "" if now is None else f" (it is {now})"
    for key in keys:
        value, default = SETTINGS[key].value(config), SETTINGS[key].default
        if value != default:
            yield (
                f"{key}={hydra_value(masked(value))}: has effect only with {needs}{present}; set {remedy or needs}, or "
                f"{key}={hydra_value(default)}."
            )
