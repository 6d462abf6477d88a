"""Computes the papers' formulas as loops over Python floats (float64), as references for the tensor functions.

Tables are lists of rows. Tokens outside a mask are dropped first, so that no result depends on them.
"""

import itertools
import math
from collections.abc import Callable, Sequence

Row = Sequence[float]
Table = Sequence[Row]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def tokens_of(row: Row, mask: Row) -> list[float]:
    return [value for value, m in zip(row, mask, strict=True) if m]


def on_tokens(per_row: Table, mask: Table) -> list[list[float]]:
    """Return the values of the tokens in the mask in their columns, and zeros elsewhere."""
    result = []
    for values, row in zip(per_row, mask, strict=True):
        left = iter(values)
        result.append([next(left) if m else 0.0 for m in row])
    return result


# Advantages. Rows in results have only the tokens in the mask.


def scores(rewards: Table, mask: Table) -> list[float]:
    return [sum(tokens_of(*row)) for row in zip(rewards, mask, strict=True)]


def whiten(rows: Table) -> list[list[float]]:
    every = [value for row in rows for value in row]
    if len(every) < 2:
        return [[0.0] * len(row) for row in rows]
    variance = sum((value - mean(every)) ** 2 for value in every) / (len(every) - 1)
    return [[(value - mean(every)) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def gae(rewards: Table, values: Table, mask: Table, gamma: float, lam: float) -> tuple[list, list]:
    """Return the advantages before whitening, the sum over l of (gamma * lam)^l * delta_{t+l}, and the returns."""
    advantages, returns = [], []
    for r, v, m in zip(rewards, values, mask, strict=True):
        r, v = tokens_of(r, m), [*tokens_of(v, m), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        row = [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(r))) for t in range(len(r))]
        advantages.append(row)
        returns.append([a + b for a, b in zip(row, v[:-1], strict=True)])
    return advantages, returns


def grpo(of_group: Sequence[float], norm_by_std: bool) -> list[float]:
    if len(of_group) == 1:
        centre, deviation = 0.0, 1.0
    else:
        centre = mean(of_group)
        deviation = math.sqrt(sum((s - centre) ** 2 for s in of_group) / (len(of_group) - 1))
    return [(s - centre) / (deviation + 1e-6 if norm_by_std else 1) for s in of_group]


def rloo(of_group: Sequence[float]) -> list[float]:
    """Return each score minus the mean of the other scores."""
    result = []
    for i, score in enumerate(of_group):
        others = [s for j, s in enumerate(of_group) if j != i]
        result.append(score - mean(others) if others else score)
    return result


def subtract_group_mean(of_group: Sequence[float]) -> list[float]:
    return [s - mean(of_group) for s in of_group] if len(of_group) > 1 else list(of_group)


def pass_at_k(of_group: Sequence[float], k: int, norm_by_std: bool) -> list[float]:
    """Return for each response the mean best score of the k-subsets that contain it, minus that of all k-subsets."""
    ways = list(itertools.combinations(range(len(of_group)), k))
    best = [max(of_group[i] for i in way) for way in ways]
    deviation = math.sqrt(mean([(value - mean(best)) ** 2 for value in best]))
    return [
        (mean([value for way, value in zip(ways, best, strict=True) if i in way]) - mean(best))
        / (deviation + 1e-6 if norm_by_std else 1)
        for i in range(len(of_group))
    ]


def by_group(
    rewards: Table, mask: Table, group_size: int, function: Callable[[Sequence[float]], list[float]]
) -> list[list[float]]:
    """Apply `function` to each group's scores, and spread the results to every token."""
    every = scores(rewards, mask)
    groups = [every[start : start + group_size] for start in range(0, len(every), group_size)]
    numbers = [number for group in groups for number in function(group)]
    return [[number] * int(sum(row)) for number, row in zip(numbers, mask, strict=True)]


def rewards_to_go(rewards: Table, mask: Table, gamma: float) -> list[list[float]]:
    rows = [tokens_of(*row) for row in zip(rewards, mask, strict=True)]
    return [[sum(gamma ** (s - t) * row[s] for s in range(t, len(row))) for t in range(len(row))] for row in rows]


# Losses of one token, with its metrics.


def vanilla(log_prob: float, old: float, advantage: float, low: float, high: float, c: float) -> list[float]:
    """Return the loss, whether clipping changed it, and whether dual clip changed it."""
    ratio = math.exp(clip(log_prob - old, -20, 20))
    unclipped, clipped = -advantage * ratio, -advantage * clip(ratio, 1 - low, 1 + high)
    loss, ceiling = max(unclipped, clipped), -advantage * c
    lowered = advantage < 0 and loss > ceiling
    return [ceiling if lowered else loss, float(clipped > unclipped), float(lowered)]


def gspo(
    log_probs: Sequence[float],
    now: Sequence[float],
    old: Sequence[float],
    advantages: Sequence[float],
    low: float,
    high: float,
) -> list[list[float]]:
    """Return loss and clipping of a response's tokens; `now` are the log-probs where the formula stops gradients."""
    result = []
    for t, log_prob in enumerate(log_probs):
        of_sequence = mean([n - o for n, o in zip(now, old, strict=True)])
        ratio = math.exp(min(of_sequence + log_prob - now[t], 10))
        unclipped, clipped = -advantages[t] * ratio, -advantages[t] * clip(ratio, 1 - low, 1 + high)
        result.append([max(unclipped, clipped), float(clipped > unclipped)])
    return result


def cispo(log_prob: float, now: float, old: float, advantage: float, low: float, high: float) -> list[float]:
    """Return the loss and whether the weight was clipped; `now` is the log-prob where the formula stops gradients."""
    ratio = math.exp(clip(now - old, -20, 20))
    weight = clip(ratio, 1 - low, 1 + high)
    return [-weight * advantage * log_prob, float(weight != ratio)]


def clip_cov(log_prob: float, old: float, advantage: float, chosen: float, low: float, high: float) -> list[float]:
    """Return the loss, whether PPO's clip changed it, and whether the token was chosen to have no loss."""
    loss, clipped, _ = vanilla(log_prob, old, advantage, low, high, math.inf)
    return [0.0 if chosen else loss, clipped, chosen]


def kl_cov(log_prob: float, old: float, advantage: float, chosen: float, weight: float) -> list[float]:
    """Return the loss, and whether the token was chosen for the KL penalty."""
    ratio = math.exp(clip(log_prob - old, -20, 20))
    return [-advantage * ratio + (weight * abs(log_prob - old) if chosen else 0.0), chosen]


def sapo(log_prob: float, old: float, advantage: float, tau_pos: float, tau_neg: float) -> list[float]:
    """Return the loss, and the gate's slope at the ratio relative to its slope at 1."""
    ratio, tau = math.exp(clip(log_prob - old, -20, 20)), tau_pos if advantage > 0 else tau_neg

    def gate(x: float) -> float:
        exponent = -tau * (x - 1)
        return 4 / tau / (1 + math.exp(exponent)) if exponent < 700 else 0.0

    p = gate(ratio) * tau / 4
    return [-advantage * gate(ratio), 4 * p * (1 - p)]


def value_loss(value: float, old: float, target: float, cliprange: float) -> list[float]:
    plain, clipped = (value - target) ** 2, (clip(value, old - cliprange, old + cliprange) - target) ** 2
    return [0.5 * max(plain, clipped), float(clipped > plain)]


def kl(log_prob: float, ref: float, kind: str) -> float:
    difference = log_prob - ref
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "abs":
        return abs(difference)
    x = clip(-difference, -20, 20)
    return clip(math.exp(x) - x - 1, -10, 10)


def is_weights(
    old: Table, rollout: Table, mask: Table, level: str, threshold: float, lower: float | None
) -> list[list[list[float]]]:
    """Return weight and truncation (or masking, with a lower bound) of the tokens in the mask, row by row."""
    result = []
    for o, r, m in zip(old, rollout, mask, strict=True):
        ratios = [math.exp(clip(d, -20, 20)) for d in differences(o, r, m)]
        if level == "sequence":
            ratios = [math.exp(clip(sum(differences(o, r, m)), -20, 20))] * len(ratios)
        if lower is None:
            result.append([[min(ratio, threshold), float(ratio > threshold)] for ratio in ratios])
        else:
            inside = [lower <= ratio <= threshold for ratio in ratios]
            result.append([[ratio * kept, float(not kept)] for ratio, kept in zip(ratios, inside, strict=True)])
    return result


def accepted(
    old: Table, rollout: Table, mask: Table, kind: str, threshold: float, lower: float | None
) -> list[list[float]]:
    """Return whether each token in the mask is accepted for training, row by row."""
    result = []
    for o, r, m in zip(old, rollout, mask, strict=True):
        of_row = []
        for d in differences(o, r, m):
            d = clip(d, -20, 20)
            of_row.append({"k1": d, "k2": 0.5 * d * d, "k3": math.exp(d) - d - 1}[kind[-2:]])
        if kind.startswith("seq") and of_row:
            whole = {"sum": sum(of_row), "mean": mean(of_row), "max": max(of_row)}[kind.split("_")[1]]
            of_row = [whole] * len(of_row)
        if kind.endswith("k1"):
            bounds = 1 / threshold if lower is None else lower, threshold
            result.append([float(bounds[0] <= math.exp(value) <= bounds[1]) for value in of_row])
        else:
            result.append([float(value <= threshold) for value in of_row])
    return result


def differences(one: Row, other: Row, mask: Row) -> list[float]:
    return [a - b for a, b in zip(tokens_of(one, mask), tokens_of(other, mask), strict=True)]


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Return DAPO's penalty for a length up to `max_length`. The paper's third case, longer responses, is left out."""
    if length <= max_length - buffer:
        return 0.0
    return ((max_length - buffer) - length) / buffer * factor


def aggregate(values: Table, mask: Table, mode: str, scale_factor: float) -> float:
    """Aggregate token values to one number, without tokens outside the mask and rows without tokens."""
    rows = [row for row in (tokens_of(*both) for both in zip(values, mask, strict=True)) if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-mean":
        return mean([mean(row) for row in rows])
    total = mean([sum(row) for row in rows])
    return total / scale_factor if mode == "seq-mean-token-sum-norm" else total
