"""Bounds the rounding error of sums: the largest difference between two computations of a sum on any processor."""

import torch

FLOAT32 = torch.finfo(torch.float32).eps
"""Largest difference between two numbers that are the nearest float32 to almost the same number, as a share of it."""


def sum_bound(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest error of a sum of `terms` numbers in any order, relative to the sum of absolute values.

    Each addition is off by half a unit in the last place (Higham, Accuracy and Stability of Numerical Algorithms, 4.2),
    so two sums differ by a whole unit.
    """
    return terms * torch.finfo(dtype).eps


def log_softmax_bound(terms: int, largest: float, dtype: torch.dtype = torch.float32) -> float:
    """Largest difference between two computations of a log-softmax over `terms` logits, with a temperature or without.

    In half units in the last place, where L is `largest`, the largest absolute value of a logit after the temperature:
    a difference of two logits is off by 4 L, with its own rounding. The logarithm of the sum of their exponentials is
    off by 4 L + terms + 4, its own rounding included up to log(terms). The result adds 2 L + log(terms).
    """
    return (10 * largest + 2 * terms + 4) * torch.finfo(dtype).eps
