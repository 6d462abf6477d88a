"""Finds stored settings that an evaluation uses only with the user's consent.

These settings name code, give code rights or read the user's environment.

Anyone can write a checkpoint's configuration, and its hashes. Without consent, a downloaded checkpoint could run its
own file with the user's tokens. A user's own run is no exception: a whole run directory can be downloaded,
too. Names of bundled rewards, environments and data converters need no consent.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from rlhf.config.algorithm_table import ESTIMATORS, POLICY_LOSSES, SETTINGS_OF_ONE_FUNCTION
from rlhf.config.known_settings import SETTINGS
from rlhf.config.library import PACKAGE, Library
from rlhf.config.overrides import hydra_value
from rlhf.config.schema.reward import REWARD_MODEL, VERIFIERS
from rlhf.config.secrets import interpolates

FLAG = "--trust-settings"
_NAMES = ("reward.functions", "env.classes", "env.command", "data.custom_cls.path")
"""Settings that name code. The values in bundled files need no consent."""
_RIGHTS = (
    *("reward.kwargs", "reward.pass_env", "reward.network", "reward.writable"),
    *("env.kwargs", "env.pass_env", "env.network", "env.writable"),
    *("model.trust_remote_code", "rollout.engine_kwargs.vllm", "rollout.servers.urls"),
)
"""Settings that give code its arguments or rights, or name servers. Only null, false and empty need no consent.
vLLM's arguments name classes to import."""


def take_settings_to_confirm(tree: DictConfig, unused: Collection[str]) -> dict[str, Any]:
    """Remove the settings that need consent from a stored configuration. Return their values by name.

    Args:
        tree: changes in place: the settings become missing (`???`) or empty mappings. No interpolation is resolved.
        unused: settings that the evaluation replaces anyway. They are removed, but not returned.
    """
    taken = {key: value for key, value in _leaves(OmegaConf.to_container(tree, resolve=False)) if _needs(key, value)}
    for key, value in taken.items():
        OmegaConf.update(tree, key, {} if isinstance(value, dict) else "???", merge=False)
    return {key: value for key, value in taken.items() if key not in unused}


def unconfirmed(tree: DictConfig, typed: Collection[str], to_confirm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `to_confirm` that neither the command line nor an entry or recipe named there has set.

    Args:
        tree: the composition of the stored configuration with the command line.
        typed: settings of the command line. An entry of a mapping is no consent to the mapping's other entries.
    """

    def is_set(key: str) -> bool:
        if key in typed or any(name.startswith(f"{key}.") for name in typed):
            return key in typed
        section, _, name = key.rpartition(".")
        return not OmegaConf.is_missing(OmegaConf.select(tree, section), name) and OmegaConf.select(tree, key) != {}

    return {key: value for key, value in to_confirm.items() if not is_set(key)}


def drop_training_code(tree: DictConfig) -> None:
    """Replace a user's estimator and policy loss by bundled functions, because an evaluation calls neither."""
    estimator = "gae" if OmegaConf.select(tree, "critic.enable") else "reinforce_plus_plus"
    for key, bundled, replacement in (
        ("algorithm.adv_estimator", ESTIMATORS, estimator),
        ("actor.policy_loss.loss_mode", POLICY_LOSSES, "vanilla"),
    ):
        if OmegaConf.select(tree, key) in bundled:
            continue
        OmegaConf.update(tree, key, replacement)
        # A user's function may read settings that `validate` allows only with one bundled function.
        for setting in (setting for setting, owner in SETTINGS_OF_ONE_FUNCTION.items() if owner in bundled):
            OmegaConf.update(tree, setting, SETTINGS[setting].default)


def consent_needed(name: str, settings: Mapping[str, Any]) -> str:
    """Return the message about settings of the run or checkpoint `name` to which nobody has consented."""
    shown = "\n".join(f"  {key}={hydra_value(value)}".replace("\\${", "${") for key, value in settings.items())
    return (
        f"{name}: its stored settings name code, give code rights, or read your environment:\n{shown}\nIf you trust "
        f"the author of these settings, add {FLAG}. Otherwise, set each of them in the command."
    )


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in SETTINGS or not isinstance(value, dict):
            yield key, value
        else:
            yield from _leaves(value, f"{key}.")


def _needs(key: str, value: Any) -> bool:
    if interpolates(value) or (key in _RIGHTS and value):
        return True
    return key in _NAMES and any(name not in _bundled(key) for name in (value if isinstance(value, list) else [value]))


@cache
def _bundled(key: str) -> frozenset[str | None]:
    """Return the names that need no consent: the verifiers, and the values of the setting in bundled files."""
    found: set[str | None] = {None, *((*VERIFIERS, REWARD_MODEL) if key == "reward.functions" else ())}
    section, _, rest = key.partition(".")
    library = Library.find(None)
    for group in (section, "recipes"):
        for path in library.entries(group).values():
            text = re.sub(r"\$\{rlhf\.package:([^}]*)\}", lambda found: f"{PACKAGE}/{found[1]}", path.read_text())
            tree = OmegaConf.create(yaml.safe_load(text) or {})
            value = OmegaConf.select(tree, rest if group == section else key)
            found.update(value if isinstance(value, ListConfig) else [value])
    return frozenset(found)
