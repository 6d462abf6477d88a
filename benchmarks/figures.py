"""Computes figures of interleaved runs: rotating order, medians with spread, ratios within a round."""

import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def rotated(ways: Iterable[T], start: int) -> list[T]:
    """Return the ways rotated to begin at `start`, so that no way always runs first."""
    ways = list(ways)
    start %= len(ways)
    return ways[start:] + ways[:start]


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Format the median with the minimum and maximum."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio of each run to the run of `base` in the same round."""
    return [a / b for a, b in zip(values, base, strict=True)]
