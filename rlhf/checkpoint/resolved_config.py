"""Resolved configuration as checkpoints need it: text that each save stores and a resume compares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True)
class ResolvedConfig:
    """The whole configuration of a run as YAML.

    `check` is called with the text of a stored one; it raises UserError unless the run may continue from a checkpoint
    that has it.
    """

    text: str
    check: Callable[[str], None]

    def setting(self, key: str) -> Any:
        """The value of a dotted setting, for messages."""
        value = yaml.safe_load(self.text)
        for name in key.split("."):
            value = value[name]
        return value
