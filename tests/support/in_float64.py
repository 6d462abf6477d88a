"""Forces float64 computations, even if code converts to float32 by name like transformers' norms.

Two computations of a formula then differ by about 1e-16 per operation with any processor's kernels. So a test with
`TOLERANCE` still finds every error in a formula.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

TOLERANCE = 1e-9
"""Allows for float64's relative error of 1e-16, gradients of up to 1e5 terms, and a few steps of AdamW."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Make this process create float64 tensors, and convert or take softmax in float64 instead of float32.

    A tensor that code creates in float32 by name stays float32, and rounds values that are assigned to parts of it.
    """
    usual = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(Tensor, "to", _widened(Tensor.to))
        patch.setattr(nn.functional, "softmax", _widened(nn.functional.softmax))
        patch.setattr(Tensor, "__setitem__", _rounding(Tensor.__setitem__))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


def _widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def widened(*args: Any, **kwargs: Any) -> Tensor:
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*wide, **kwargs)

    return widened


def _rounding(assign: Callable[[Tensor, Any, Any], None]) -> Callable[[Tensor, Any, Any], None]:
    def rounding(tensor: Tensor, place: Any, value: Any) -> None:
        rounds = isinstance(value, Tensor) and (value.dtype, tensor.dtype) == (torch.float64, torch.float32)
        assign(tensor, place, value.type(torch.float32) if rounds else value)

    return rounding
