"""Bounds of the rounding in sums: the largest difference between two computations of one sum, on any processor."""

import torch


def sum_bound(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Largest error of a sum of `terms` numbers in any order, as a share of the sum of their absolute values: each
    addition is off by half a unit in the last place (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and
    so are two such sums by a whole one."""
    return terms * torch.finfo(dtype).eps
