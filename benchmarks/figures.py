"""Figures of interleaved runs: an order that rotates, medians with their spread, ratios of runs of one round."""

import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def rotated(ways: Iterable[T], start: int) -> list[T]:
    """The ways from the `start`-th on, so that none always runs first or after the same one."""
    ways = list(ways)
    start %= len(ways)
    return ways[start:] + ways[:start]


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Median, and the smallest and the largest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """The ratio of each run to the one of `base` in the same round."""
    return [a / b for a, b in zip(values, base, strict=True)]
