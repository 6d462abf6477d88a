"""Translates the settings of another trainer: first by conversions of values, then by the tables of names."""

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.config.known_settings import SETTINGS, setting_of
from rlhf.config.names.hints import remark
from rlhf.config.names.other_trainers import other_trainers
from rlhf.config.translation import openrlhf, trl, verl
from rlhf.config.translation.recipe import Recipe, Theirs

CONVERSIONS: dict[str, Callable[[Theirs, Recipe], None]] = {
    "verl": verl.convert,
    "trl": trl.convert,
    "openrlhf": openrlhf.convert,
}


RUNS_CODE = (
    "data.custom_cls.",
    "env.",
    "model.trust_remote_code",
    "reward.functions",
    "reward.network",
    "reward.pass_env",
    "reward.writable",
    "tracking.alerts.",
    "trainer.callback",
)
"""Prefixes of settings that run code, or give code more rights. A translation must not set them unnoticed."""
_MAY_NAME_FILE = ("actor.policy_loss.loss_mode", "algorithm.adv_estimator")
_CODE_OF_VLLM = re.compile(r"trust_remote_code|.*_cls|.*plugin.*|.*processors|middleware")


def translate(trainer: str, settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe for the `settings` of `trainer`, a name in `CONVERSIONS`.

    Where defaults differ, the other trainer's default is translated like a setting of the user.
    """
    prefixes = other_trainers().prefixes
    named = {_without(prefixes, name): value for name, value in settings.items()}
    off = [name.rpartition(".")[0] for name, value in named.items() if _switches_off(name, value)]
    named = {name: value for name, value in named.items() if not any(name.startswith(f"{s}.") for s in off)}
    defaults = defaults_of(trainer)
    # null means the trainer's default.
    given = {name: value for name, value in named.items() if value is not None or name not in defaults}
    theirs, recipe = Theirs(given, defaults), Recipe()
    CONVERSIONS[trainer](theirs, recipe)
    for name, value, used in theirs.clashes:
        recipe.lose(name, value, f"{used} is another name of this setting, and the recipe has the value of {used}.")
    # Translate the file's settings before the defaults, which may have another name for the same setting.
    for name in sorted(theirs.left, key=lambda name: name not in named):
        if name in named or _key(trainer, name) not in recipe.settings:
            _by_name(trainer, name, theirs.left[name], recipe)
    return recipe


@cache
def defaults_of(trainer: str) -> dict[str, Any]:
    """Return the trainer's defaults, by its own names, that differ from the defaults here."""
    tables = tomllib.loads(Path(__file__).with_name("defaults.toml").read_text(encoding="utf-8"))
    defaults: dict[str, Any] = tables[trainer]
    return defaults


def _by_name(trainer: str, name: str, value: Any, recipe: Recipe) -> None:
    """Translate a setting whose value needs no conversion."""
    key = _key(trainer, name)
    if setting_of(key) is not None and _runs_code(key, value):
        recipe.code[name] = value
        return
    if setting_of(key) is not None:
        recipe.set(key, value, name)
        return
    why = remark(name)
    if why is not None and why.startswith("Leave it out"):
        recipe.needless.append(name)
    elif value is None or value is False or value in ("", [], {}) or name.endswith("_target_"):
        return  # disabled in the other trainer, or a class name for Hydra
    elif why is not None:
        recipe.lose(name, value, why)
    else:
        recipe.unknown[name] = value


def _runs_code(key: str, value: Any) -> bool:
    """Return whether `key=value` runs code, or gives code more rights."""
    if value in (None, "", False) or value == [] or value == {}:
        return False
    if key.startswith(RUNS_CODE) or (key in _MAY_NAME_FILE and (".py" in str(value) or "${" in str(value))):
        return True
    if isinstance(value, dict):
        return any(_runs_code(f"{key}.{name}", item) for name, item in value.items())
    vllm = key.startswith("rollout.engine_kwargs.")
    return vllm and any(map(_CODE_OF_VLLM.fullmatch, key.split(".")))


def _switches_off(name: str, value: Any) -> bool:
    """Return whether the setting disables its section, and we have no setting of this name."""
    section, _, leaf = name.rpartition(".")
    return leaf in ("enable", "enabled") and value is False and bool(section) and setting_of(name) is None


def _key(trainer: str, name: str) -> str:
    """Return our name for a setting of `trainer`, or `name` unchanged if we have none.

    Search this trainer's table of names, then the tables of the other trainers. If both lack the name and it has no
    dots, return the one setting of ours whose last part is `name`, unless there are several.
    """
    tables = other_trainers()
    found = tables.names[trainer].get(name) or tables.settings.get(name)
    if found is None and "." not in name:
        same = [key for key in SETTINGS if key.rpartition(".")[2] == name]
        found = same[0] if len(same) == 1 else None
    return found or name


def _without(prefixes: tuple[str, ...], name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)
