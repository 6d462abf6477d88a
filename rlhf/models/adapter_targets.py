"""Choice of the layers that get adapters, by their names, for the trainer and the memory plan. Imports no torch."""

from collections.abc import Iterable

from rlhf.config.schema.lora import ALL_LINEAR, LoraConfig


def named_by(module: str, ends: Iterable[str]) -> bool:
    """Whether the name of a module is one of `ends`, or ends with a dot and one of them."""
    return any(module == end or module.endswith(f".{end}") for end in ends)


def chosen_layers(lora: LoraConfig, linear: Iterable[str]) -> list[str]:
    """Those of the `linear` layers, without the head, that `model.lora.target_modules` names and
    `model.lora.exclude_modules` does not; sorted."""
    every = lora.target_modules == ALL_LINEAR
    return sorted(
        name
        for name in linear
        if (every or named_by(name, lora.target_modules)) and not named_by(name, lora.exclude_modules)
    )


def largest_rank(shapes: Iterable[tuple[int, ...]]) -> int:
    """The largest rank that an adapter of any weight of these shapes can have: its smaller side; 0 of none."""
    return max(map(min, shapes), default=0)
