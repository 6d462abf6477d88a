"""Makes random tables for tests of tensor functions, gradients by central differences, and tolerances."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.in_float64 import TOLERANCE

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
Rows = list[list[float]]


def close(ours: Tensor, expected: object, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(expected, dtype=ours.dtype), rtol=tolerance, atol=tolerance)


def random_table(rng: random.Random, rows: int, columns: int, scale: float) -> Rows:
    return [[rng.gauss(0, scale) for _ in range(columns)] for _ in range(rows)]


def random_mask(rng: random.Random, rows: int, columns: int) -> Rows:
    """Return a mask of random lengths, with holes in half of the cases.

    The first row has a token. If there are other rows, at least one of them has none.
    """
    lengths = [rng.randint(0, columns) for _ in range(rows)]
    holes = rng.choice([0.0, 0.3])
    mask = [[float(column < n and rng.random() >= holes) for column in range(columns)] for n in lengths]
    if rows > 1:
        mask[rng.randrange(1, rows)] = [0.0] * columns
    mask[0][rng.randrange(columns)] = 1.0
    return mask


def tensor(table: Rows, mask: Rows | None = None) -> Tensor:
    """Return a [rows, columns] float64 tensor, NaN outside the mask if given."""
    result = torch.tensor(table, dtype=torch.float64)
    return result if mask is None else result.masked_fill(torch.tensor(mask) == 0, torch.nan)


SLOPES = 1e-6
"""Tolerance for `slopes`: the error is 1e-12 of a third derivative (step 1e-6) and, by rounding, 1e-10 of a value."""


def slopes(function: Callable[[Rows], float], at: Rows) -> Rows:
    """Return the gradient by central differences."""
    step = 1e-6
    result = [[0.0] * len(row) for row in at]
    for i, row in enumerate(at):
        for j, value in enumerate(row):
            row[j] = value + step
            above = function(at)
            row[j] = value - step
            result[i][j] = (above - function(at)) / (2 * step)
            row[j] = value
    return result
