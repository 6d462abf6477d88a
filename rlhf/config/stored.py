"""Stored configurations as plain sections, for readers of a few settings; imports no schema and no omegaconf."""

from typing import Any

import yaml

from rlhf.config.migrations import migrate


class _NoAliases(yaml.SafeLoader):
    """Refuses what a text of a few bytes could make endless values of; a resolved configuration has none."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def stored_sections(text: str | bytes, release: str | None = None) -> dict[str, Any]:
    """Return the configuration that `release` (None if unknown) resolved and stored as `text` under the present names,
    without the schema's types and defaults. Raises ValueError for a text that is none."""
    try:
        stored = _NoAliases(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"no YAML: {type(error).__name__}") from None
    if not isinstance(stored, dict):
        raise ValueError("no sections")
    return migrate(stored, release).tree
