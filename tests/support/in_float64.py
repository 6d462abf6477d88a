"""Computations in float64 throughout, also where code asks for float32 by name, as the norms of transformers do.

Two ways to compute one formula then differ by about 1e-16 for each operation, whatever kernels a processor has: a test
can ask for `TOLERANCE` and still find every error in a formula.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

TOLERANCE = 1e-9
"""A float64 is off by 1e-16 of itself, a gradient is a sum of up to 1e5 terms, and a few steps of AdamW follow."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Let this process make tensors in float64, and get float64 where it converts or takes a softmax to float32."""
    usual = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(Tensor, "to", _widened(Tensor.to))
        patch.setattr(nn.functional, "softmax", _widened(nn.functional.softmax))
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
