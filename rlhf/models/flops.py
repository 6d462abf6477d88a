"""Floating-point operations of a transformer's update, and how much of a device's peak they are (MFU).

Model FLOPs utilization counts what the mathematics takes, not what is computed again to save memory (Chowdhery et al.,
arXiv 2204.02311, appendix B); as in verl, attention counts the causal half.
"""

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.batch import TokenCounts

_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts")
_DENSE_LAYERS = {"full_attention", "sliding_attention"}

PEAKS: dict[str, tuple[float, float]] = {
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "A10": (125e12, 31.2e12),
    "A40": (149.7e12, 37.4e12),
    "L4": (121e12, 30.3e12),
    "L40": (181e12, 90.5e12),
    "L40S": (362e12, 91.6e12),
    "H20": (148e12, 44e12),
    "H100": (989.4e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H800": (989.4e12, 67e12),
    "H200": (989.4e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "B200": (2250e12, 75e12),
    "MI300X": (1307.4e12, 163.4e12),
}
"""By words of a device's name: operations per second in bfloat16 and in float32, without sparsity and without TF32.

From the makers' data sheets: https://www.nvidia.com/en-us/data-center/ (a100, a10, a40, l4, l40, l40s, h100, h200, dgx
b200), where figures with an asterisk are halved, since they count sparsity; https://www.amd.com (Instinct MI300X).
H20: verl's table (`verl/utils/flops_counter.py`)."""


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Operations per second that the device has at most in bfloat16 or float32; None for one that is not known."""
    words = set(re.split(r"[\s-]+", device_name))
    fitting = [name for name in PEAKS if words >= set(name.split())]
    if not fitting or dtype not in (torch.bfloat16, torch.float32):
        return None
    in_bfloat16, in_float32 = PEAKS[max(fitting, key=len)]
    return in_bfloat16 if dtype == torch.bfloat16 else in_float32


@dataclass(frozen=True)
class UpdateFlops:
    """Operations of a forward and backward pass through a dense causal transformer."""

    body: int
    """Weights of matrix products that every token passes."""
    head: int
    """Weights of the head, which response tokens pass."""
    attention: int
    """Layers times heads times their size: what a pair of tokens takes two products of."""
    frozen_body: int = 0
    """Those of `body` that are not trained: they take no gradient of their own."""
    frozen_head: int = 0
    """The same of `head`."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "UpdateFlops | None":
        """From a model before it is spread over ranks, on any device; None where experts or linear attention make the
        count another one."""
        config = model.config.get_text_config()
        heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
        kinds = set(getattr(config, "layer_types", None) or _DENSE_LAYERS)
        if not heads or not layers or kinds - _DENSE_LAYERS or any(getattr(config, n, None) for n in _NOT_DENSE):
            return None
        head = model.get_output_embeddings()
        products = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        in_head = 0 if head is None else head.weight.numel()
        return cls(
            sum(module.weight.numel() for module in products),
            in_head,
            layers * heads * size,
            sum(module.weight.numel() for module in products if not module.weight.requires_grad),
            0 if head is None or head.weight.requires_grad else in_head,
        )

    def of_tokens(self, tokens: TokenCounts) -> int:
        """Operations of one pass over a batch."""
        # Two operations per weight, the backward pass takes twice the forward one; half of all pairs are causal.
        trained = 6 * (self.body * tokens.total + self.head * tokens.responses + self.attention * tokens.squares)
        return trained - 2 * (self.frozen_body * tokens.total + self.frozen_head * tokens.responses)
