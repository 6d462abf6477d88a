"""Reads a stored configuration as plain dictionaries, for callers that need a few settings.

Imports no schema and no omegaconf.
"""

from typing import Any

import yaml

from rlhf.config.migrations import migrate


class _NoAliases(yaml.SafeLoader):
    """Rejects YAML aliases, which expand a few bytes without end. A resolved configuration has no aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


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
        stored = _NoAliases(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not valid YAML: {type(error).__name__}") from None
    if not isinstance(stored, dict):
        raise ValueError("not a mapping of sections")
    return migrate(stored, release).tree
