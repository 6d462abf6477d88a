"""Reads a stored configuration as plain dictionaries, for callers that need a few settings.

Imports no schema and no omegaconf.
"""

from typing import Any

import yaml

from rlhf.config.migrations import migrate


class _NoAliases(yaml.SafeLoader):
    """Rejects YAML aliases, which can expand a few bytes to gigabytes. A resolved configuration has no aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def parse_yaml(text: str | bytes) -> Any:
    """Return the content of a YAML document. Raise yaml.YAMLError if `text` is not valid, or has an alias, a date that
    does not exist, or a number that is too long."""
    try:
        return _NoAliases(text).get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # from PyYAML's constructors
        raise yaml.YAMLError(f"a value cannot be read ({error})") from error


def parse_sections(text: str | bytes) -> dict[str, Any]:
    """Parse a stored configuration. Raise yaml.YAMLError if `text` is not a YAML mapping without aliases."""
    sections = parse_yaml(text)
    if not isinstance(sections, dict):
        raise yaml.YAMLError("not a mapping of sections")
    return sections


def stored_sections(text: str | bytes, release: str | None = None) -> dict[str, Any]:
    """Return a stored configuration as dictionaries by section, with its settings under their current names.

    Applies neither the schema's types nor its defaults.

    Args:
        text: the YAML that `release` stored.
        release: None if unknown.

    Raises:
        ValueError: `text` is not a YAML mapping.
    """
    try:
        return migrate(parse_sections(text), release).tree
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {str(error).splitlines()[0]}") from None
