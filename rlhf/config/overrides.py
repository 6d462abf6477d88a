"""Writes a command line that reproduces a stored configuration without a recipe."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

from rlhf.config import Config
from rlhf.config.derived import trains_critic
from rlhf.config.known_settings import SETTINGS
from rlhf.config.library import PACKAGE, Library
from rlhf.config.redaction import REDACTED, SECRET, has_secret
from rlhf.config.stored import stored_sections

NAMES = (
    "model.path",
    "model.revision",
    "critic.path",
    "critic.revision",
    "reward_model.path",
    "reward_model.revision",
    "data.val_files",
    "trainer.nproc",
    "trainer.nnodes",
    "trainer.test_freq",
)
"""Settings that a resumed run may change, but that a new run must copy to compute the same numbers."""
TINY = PACKAGE / "models/tiny_policy"
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./:@-]*")


def stored_settings(text: str | bytes, release: str | None = None) -> dict[str, Any]:
    """Return the known settings that `release` stored in `text`, by their current dotted names.

    Raises:
        ValueError: as `stored_sections`.
    """
    return dict(_known(stored_sections(text, release)))


def command_of(settings: Mapping[str, Any]) -> list[str]:
    """Return arguments of `python -m rlhf.train` for a run that computes the same numbers as one with `settings`.

    Secrets in the values are redacted and absolute paths are cut (`publishable`).
    """
    base, arguments = _without_recipe(), ["recipes=null"]
    # Without a critic, critic settings have no effect: a recipe may have them, but the command line rejects them.
    enable = settings.get("critic.enable")
    critic = trains_critic(settings.get("algorithm.adv_estimator", base["algorithm.adv_estimator"]), enable)
    if settings.get("model.path") == str(TINY):
        arguments.append("model=tiny")
    for key, value in settings.items():
        counts = key in NAMES or SETTINGS[key].metadata["resume"] == "trajectory"
        idle = not critic and key.startswith("critic.") and key != "critic.enable"
        if counts and not idle and value != base[key] and value != str(TINY):
            arguments.append(f"{key}={hydra_value(publishable(value))}")
    return arguments


def as_shell(arguments: list[str]) -> str:
    """Return `arguments` of python -m rlhf.train as lines for a shell."""
    return " \\\n  ".join(["python -m rlhf.train", *map(shlex.quote, arguments)])


def publishable(value: Any) -> Any:
    """Return `value` with secrets redacted, and with absolute paths cut to their last component."""
    if isinstance(value, dict):
        return {key: REDACTED if has_secret(str(key), item) else publishable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [publishable(item) for item in value]
    if not isinstance(value, str):
        return value
    value = SECRET.sub(REDACTED, value)
    if "://" in value:
        scheme, _, rest = value.partition("://")
        value = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
        if scheme != "file":
            return value
        value = f"/{value.removeprefix('file://')}"
    return PurePosixPath(value).name if value.startswith(("/", "~")) else value


def _known(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in SETTINGS:
            yield key, value
        elif isinstance(value, dict):
            yield from _known(value, f"{key}.")


def _without_recipe() -> dict[str, Any]:
    config, library = Config(), Library.find(None)
    settings = {key: setting.value(config) for key, setting in SETTINGS.items()}
    for default in yaml.safe_load((library.conf / "train.yaml").read_text())["defaults"]:
        for group, name in default.items() if isinstance(default, dict) else ():
            if group in library.groups:
                text = library.entries(group)[name].read_text()
                prefix = "" if "# @package _global_" in text else f"{group}."
                settings |= dict(_known(yaml.safe_load(text) or {}, prefix))
    return settings


def hydra_value(value: Any) -> str:
    """Return `value` in the syntax of Hydra's command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(hydra_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{hydra_value(key)}:{hydra_value(item)}' for key, item in value.items())}}}"
    if not isinstance(value, str):
        return repr(value)
    if _PLAIN.fullmatch(value) and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped).replace("${", "\\${")
    return f'"{escaped}"'
