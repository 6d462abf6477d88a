"""Log-probs of given tokens from hidden states by Liger's fused linear cross-entropy (`liger-kernel`, in Triton)."""

import importlib
from typing import Any

import torch
from torch import Tensor


def liger_log_probs(hidden: Tensor, labels: Tensor, temperature: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `rlhf.algorithms.token_log_probs.token_log_probs` without an entropy, up to rounding: Liger rounds the head's
    product to the type of `hidden` before the bias is added, and the temperature divides what goes into the product.

    Args:
        hidden: [M, H], M > 0; the others as there.
    """
    functional: Any = importlib.import_module("liger_kernel.transformers.functional")
    losses = functional.liger_fused_linear_cross_entropy(
        hidden / temperature,
        weight,
        labels,
        None if bias is None else bias / temperature,
        reduction="none",
        accum_dtype=torch.float32,
    )
    return -losses
