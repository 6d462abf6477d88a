"""Bounds the rounding error of sums: the largest difference between two computations of a sum on any processor."""

import torch


def sum_bound(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest error of a sum of `terms` numbers in any order, relative to the sum of absolute values.

    Each addition is off by half a unit in the last place (Higham, Accuracy and Stability of Numerical Algorithms, 4.2),
    so two sums differ by a whole unit.
    """
    return terms * torch.finfo(dtype).eps
