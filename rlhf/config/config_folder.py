"""Reads folders of configuration files for Hydra; a file may select a group's entry, or require a setting."""

from pathlib import Path
from typing import ClassVar

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict

from rlhf.config.known_settings import SETTINGS
from rlhf.errors import UserError


class ConfigFolder(FileConfigSource):
    """Reads a folder of configuration files, and adds two features that Hydra lacks.

    A file may select a group's entry as on the command line (`algorithm: ppo`). A file may require a setting (`???`),
    even if an earlier file sets the same setting.
    """

    groups: frozenset[str] = frozenset()
    set_by_files: ClassVar[set[str]] = set()
    required_by_files: ClassVar[set[str]] = set()
    """Settings that a composition's files set (`set_by_files`), and settings that the files require (`???`)."""

    @staticmethod
    def scheme() -> str:
        return "library"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the file's configuration, with selected entries moved to the end of its defaults list for Hydra."""
        file = f"{self.path}/{config_path.removesuffix('.yaml')}.yaml"
        try:
            result = super().load_config(config_path)
        except OSError as error:
            if "Invalid loaded object type" not in str(error):
                raise
            raise UserError(_not_a_mapping(file, "one value")) from error
        content = result.config
        if not isinstance(content, DictConfig):
            raise UserError(_not_a_mapping(file, "a list"))
        # OmegaConf reads plain text as a key without a value.
        given = [value for _, value in content.items_ex(resolve=False)]
        if given == [None] and isinstance(yaml.safe_load(Path(file).read_bytes()), str):
            raise UserError(_not_a_mapping(file, "one value"))
        if result.header.get("package") != "_global_":
            self._record(file, content, config_path.partition("/")[0] + ".")
            return result
        values = {str(key): value for key, value in content.items_ex(resolve=False)}
        selected = [key for key in sorted(self.groups) if isinstance(values.get(key), str)]
        if selected:
            with open_dict(content):
                overrides = {f"override /{key}": content.pop(key) for key in selected}
                defaults = list(content.get("defaults") or [])
                listed = {str(key) for default in defaults if isinstance(default, DictConfig) for key in default}
                if twice := sorted(listed & overrides.keys()):
                    group = twice[0].removeprefix("override /")
                    raise UserError(
                        f"{file}: {group} is selected twice, by `{group}:` and by `override /{group}:`; remove one."
                    )
                content["defaults"] = [*defaults, *({key: value} for key, value in overrides.items())]
        self._record(file, content, "")
        return result

    def _record(self, file: str, content: DictConfig, prefix: str) -> None:
        for name, value in content.items_ex(resolve=False):
            key = f"{prefix}{name!s}"
            if isinstance(value, DictConfig) and not value._is_none() and not value._is_interpolation():
                self._record(file, value, f"{key}.")
            elif key in SETTINGS:
                if SETTINGS[key].reads_as_true(value):
                    raise UserError(f"{file}: {key}={value}: must be {SETTINGS[key].expects}.")
                (self.required_by_files if OmegaConf.is_missing(content, name) else self.set_by_files).add(key)


def _not_a_mapping(file: str, what: str) -> str:
    return (
        f"{file}: contains {what}, not a mapping of settings. Write each section with its settings indented below it: "
        "`trainer:`, and `  seed: 1` in the next line."
    )
