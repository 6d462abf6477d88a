"""The formulas once more, as loops over Python floats (float64): what the tensor functions are held against."""

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def grpo_advantages(scores: Sequence[float], group_size: int, norm_by_std: bool) -> list[float]:
    result = []
    for start in range(0, len(scores), group_size):
        group = scores[start : start + group_size]
        if len(group) == 1:
            mean, deviation = 0.0, 1.0
        else:
            mean = sum(group) / len(group)
            deviation = math.sqrt(sum((s - mean) ** 2 for s in group) / (len(group) - 1))
        result += [(s - mean) / (deviation + 1e-6) if norm_by_std else s - mean for s in group]
    return result


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def policy_loss(log_prob: float, old: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """The loss of a token and whether clipping changed it."""
    ratio = math.exp(clip(log_prob - old, -20, 20))
    unclipped = -advantage * ratio
    clipped = -advantage * clip(ratio, 1 - low, 1 + high)
    return max(unclipped, clipped), float(clipped > unclipped)


def kl(log_prob: float, ref: float, kind: str) -> float:
    difference = log_prob - ref
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    x = clip(-difference, -20, 20)
    return clip(math.exp(x) - x - 1, -10, 10)


def aggregate(values: Rows, mask: Rows, mode: str) -> float:
    """One number from token values: tokens outside the mask don't exist, rows without tokens don't count."""
    rows = [[v for v, m in zip(vs, ms, strict=True) if m] for vs, ms in zip(values, mask, strict=True)]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    return sum(sum(row) / len(row) for row in rows) / len(rows)
