"""Selects the layers that get adapters by name, for the trainer and the memory plan. Imports no torch."""

from collections.abc import Iterable

from rlhf.config.schema.lora import ALL_LINEAR, LoraConfig


def name_matches(module: str, ends: Iterable[str]) -> bool:
    """Return whether a module's name is one of `ends`, or ends with a dot and one of `ends`."""
    return any(module == end or module.endswith(f".{end}") for end in ends)


def chosen_layers(lora: LoraConfig, linear: Iterable[str]) -> list[str]:
    """Return, sorted, the names in `linear` (linear layers except the head) that the settings select."""
    selected = [n for n in linear if lora.target_modules == ALL_LINEAR or name_matches(n, lora.target_modules)]
    return sorted(name for name in selected if not name_matches(name, lora.exclude_modules))


def largest_rank(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the largest rank that any weight of these shapes allows: its smaller side; 0 without shapes."""
    return max(map(min, shapes), default=0)
