"""Computes log-probs of given tokens from hidden states with Liger's fused cross-entropy (`liger-kernel`, Triton)."""

import importlib
from typing import Any

import torch
from torch import Tensor


def liger_log_probs(hidden: Tensor, labels: Tensor, temperature: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the log-probs of `token_log_probs.token_log_probs`, up to rounding. `hidden` is [M, H] with M > 0.

    Liger rounds the head's product to the type of `hidden` before it adds the bias. The temperature divides `hidden`
    and `bias`, not the logits.
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
