"""Bounds rounding errors: the largest difference between two computations of the same numbers on any processor.

`sum_bound` and `log_softmax_bound` are proven bounds of one sum or one log-softmax. `forward_terms` and
`independent_bound` are estimates for whole passes, and their docstrings give the assumptions.
"""

import math

import torch

FLOAT32 = torch.finfo(torch.float32).eps
"""Largest relative difference between the float32 roundings of two numbers that are almost equal."""


def sum_bound(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest error of a sum of `terms` numbers in any order, relative to the sum of absolute values.

    Each addition is off by at most half a unit in the last place (Higham, Accuracy and Stability of Numerical
    Algorithms, 4.2), so two sums differ by at most a whole unit per term.
    """
    return terms * torch.finfo(dtype).eps


def forward_terms(*, layers: int, hidden: int, intermediate: int, head: int, tokens: int, vocabulary: int) -> int:
    """Return the terms of the sums, one after another, from a token's embedding to its log-probs; for `sum_bound`.

    In each layer: two norms, queries, the attention's output, and the gates sum over `hidden`; a norm of the queries
    and the scores sum over `head`; the softmax and the values sum over `tokens`; the MLP's output sums over
    `intermediate`. In addition, at most 24 operations work on single numbers: biases, rotations, square roots,
    quotients, exponentials and residuals. After the layers come a norm and the head over `hidden`, and the log-softmax
    over `vocabulary`.

    The count is exact for this architecture, but the bound of a pass is an estimate. The bound is too small if a layer
    amplifies relative errors, as when terms of a sum cancel. The bound is too large because it adds up the worst
    rounding of every operation, although signs alternate: n random roundings only add up to about sqrt(n) of them.
    """
    layer = 5 * hidden + 2 * head + 2 * tokens + intermediate + 24
    return layers * layer + 2 * hidden + 3 + vocabulary


def independent_bound(roundings: int, dtype: torch.dtype) -> float:
    """Estimate the relative error after `roundings` successive roundings to `dtype`: three standard deviations.

    The error of a rounding is within half a unit in the last place. If it is uniform there, its standard deviation is
    at most half a unit / sqrt(3); deviations of independent errors add up as squares. No operation may amplify the
    relative error. Use this for half precision, where the worst case of a whole pass is as large as the result.
    """
    return 3 * math.sqrt(roundings / 3) * torch.finfo(dtype).eps / 2


def log_softmax_bound(terms: int, largest: float, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest difference between two computations of a log-softmax over `terms` logits.

    The logits may be divided by a temperature; L is `largest`, the largest absolute value afterwards. In half units in
    the last place, a difference of two logits is off by 4 L, including its own rounding. The logarithm of the sum of
    their exponentials is off by 4 L + terms + 4. This includes its own rounding up to log(terms). The result adds
    2 L + log(terms).
    """
    return (10 * largest + 2 * terms + 4) * torch.finfo(dtype).eps
