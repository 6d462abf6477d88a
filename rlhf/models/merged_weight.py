"""Merges a LoRA adapter into a copy of a layer's weight."""

from collections.abc import Mapping

import torch
from torch import Tensor

KINDS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""Suffixes of an adapter's tensor names in peft, after the layer's name."""


def merged_weight(weight: Tensor, adapter: Mapping[str, Tensor], scaling: float, *, transposed: bool) -> Tensor:
    """Return W + scaling * B A as a new float32 tensor, bit for bit as peft's `merge_and_unload` in float32.

    With a DoRA magnitude m (arXiv 2402.09353, equation 5), return m (W + scaling * B A) / ||W + scaling * B A||, with
    the norm over each output's weights.

    Args:
        weight: W [out, in], or [in, out] if `transposed`, as in GPT-2's layers. Embeddings are always [in, out].
        adapter: tensors by `KINDS`: A [r, in], B [out, r], and with DoRA the magnitude of each output [out].
    """
    kind = "lora_embedding_" if "lora_embedding_A" in adapter else "lora_"
    transposed = transposed or kind != "lora_"
    product = (adapter[f"{kind}B"].float() @ adapter[f"{kind}A"].float()).mul_(scaling)
    whole = torch.add(weight.float(), product.T if transposed else product)
    if (magnitude := adapter.get("lora_magnitude_vector")) is None:
        return whole
    scale = magnitude.float().flatten() / output_norms(whole, transposed=transposed)
    return whole.mul_(scale.unsqueeze(0 if transposed else 1))


def output_norms(weight: Tensor, *, transposed: bool) -> Tensor:
    """Return the norm of each output's weights, [out], of a weight [out, in], or [in, out] if `transposed`."""
    return torch.linalg.norm(weight, dim=0 if transposed else 1)
