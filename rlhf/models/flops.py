"""Computes the floating-point operations of an update, and looks up a device's peak, for MFU.

Model FLOPs utilization counts the model's operations without recomputation (Chowdhery et al., arXiv 2204.02311,
appendix B). As in verl, attention counts the causal half; a layer with a sliding window counts the window.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
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
"""Dense operations per second in bfloat16 and in float32 (without TF32), by the words that a device's name contains.

From the makers' data sheets: https://www.nvidia.com/en-us/data-center/ (a100, a10, a40, l4, l40, l40s, h100, h200, dgx
b200), halved if marked as sparse; https://www.amd.com (Instinct MI300X).
H20: verl's table (`verl/utils/flops_counter.py`)."""


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the device's peak operations per second in bfloat16 or float32; None for an unknown device or type."""
    words = set(re.split(r"[\s-]+", device_name))
    fitting = [name for name in PEAKS if words >= set(name.split())]
    if not fitting or dtype not in (torch.bfloat16, torch.float32):
        return None
    in_bfloat16, in_float32 = PEAKS[max(fitting, key=len)]
    return in_bfloat16 if dtype == torch.bfloat16 else in_float32


def sliding_windows(config: PretrainedConfig) -> list[int | None]:
    """Return the sliding window of each layer in tokens; None for a layer with full attention."""
    text = config.get_text_config()
    window, layers = getattr(text, "sliding_window", None), getattr(text, "num_hidden_layers", None) or 0
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * layers
    return [(window or None) if kind == "sliding_attention" else None for kind in kinds]


@dataclass(frozen=True)
class UpdateFlops:
    """Counts the operations of a forward and backward pass through a dense causal transformer."""

    body: int  # number of weights in matrix products that process every token
    head: int  # number of weights of the head, which processes response tokens only
    attention: int  # layers x heads x head size; each pair of tokens needs two products of this size
    windowed: Mapping[int, int] = field(default_factory=dict)  # window -> its layers' part of `attention`
    frozen_body: int = 0  # frozen weights of `body`, which need no weight gradient
    frozen_head: int = 0  # frozen weights of `head`

    @classmethod
    def of(cls, model: PreTrainedModel) -> "UpdateFlops | None":
        """Count the weights of a model, on any device, before sharding; None with experts or linear attention."""
        config = model.config.get_text_config()
        heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
        kinds = set(getattr(config, "layer_types", None) or _DENSE_LAYERS)
        if not heads or not layers or kinds - _DENSE_LAYERS or any(getattr(config, n, None) for n in _NOT_DENSE):
            return None
        head = model.get_output_embeddings()
        products = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        in_head = 0 if head is None else head.weight.numel()
        windows = Counter(filter(None, sliding_windows(model.config)))
        return cls(
            sum(module.weight.numel() for module in products),
            in_head,
            layers * heads * size,
            {window: count * heads * size for window, count in windows.items()},
            sum(module.weight.numel() for module in products if not module.weight.requires_grad),
            0 if head is None or head.weight.requires_grad else in_head,
        )

    def of_tokens(self, tokens: TokenCounts) -> int:
        # Two operations per weight; the backward pass needs twice the forward pass; half of all pairs are causal.
        pairs = self.attention * tokens.squares
        pairs -= sum(width * tokens.beyond.get(window, 0) for window, width in self.windowed.items())
        trained = 6 * (self.body * tokens.total + self.head * tokens.responses + pairs)
        return trained - 2 * (self.frozen_body * tokens.total + self.frozen_head * tokens.responses)
