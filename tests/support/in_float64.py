"""Computations in float64 throughout, also where code asks for float32 by name, as the norms of transformers do.

Two ways to compute one formula then differ by about 1e-16 for each operation, whatever kernels a processor has: a test
can ask for 1e-9 and still find every error in a formula.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiny_updates import EveryBatch


@contextmanager
def in_float64() -> Iterator[None]:
    """Let this process get float64 where it converts a tensor, or takes a softmax, and asks for float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(Tensor, "to", _widened(Tensor.to))
        patch.setattr(nn.functional, "softmax", _widened(nn.functional.softmax))
        yield


def _widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def widened(*args: Any, **kwargs: Any) -> Tensor:
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*wide, **kwargs)

    return widened


def batch_in(dtype: torch.dtype, batch: EveryBatch) -> EveryBatch:
    """The batch with its floating point tensors in `dtype`."""
    return replace(batch, **{n: v.to(dtype) for n, v in batch.present().items() if v.is_floating_point()})
