"""Reads the retention rules that a run has stored, at its newest start or a save. Loads no torch."""

from dataclasses import asdict, fields

from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.stored import stored_sections

RULES = ("max_to_keep", "keep_every", "keep_best", "best_metric")
LARGEST_CONFIG = 1 << 20
"""Upper limit of bytes read of a configuration."""


def parse_rules(text: bytes, release: str | None = None) -> CheckpointConfig | None:
    """Return the rules in a configuration that `release` resolved, or None if it is damaged."""
    try:
        stored = stored_sections(text, release)["checkpoint"]
        settings = CheckpointConfig(**{name: stored[name] for name in RULES})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    bounds = {field.name: field.metadata for field in fields(CheckpointConfig)}
    for name, value in asdict(settings).items():
        if name not in RULES:
            continue
        may_be_null = name == "best_metric" or bounds[name]["ge"] == 1
        fits = value in bounds[name]["choices"] if name == "best_metric" else type(value) is int
        if not (fits or (may_be_null and value is None)) or (type(value) is int and value < bounds[name]["ge"]):
            return None
    return settings
