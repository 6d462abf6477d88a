"""Repacks weights that vLLM packs on a CPU but does not repack on a reload."""

from typing import Any

from torch import nn


def repack(model: nn.Module) -> None:
    """Pack heads and experts again after their weights have changed."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        # A head that is tied to embeddings would keep its old copy.
        if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)
        # vLLM packs experts only at the first load, and would use reloaded experts as if packed.
        weight = getattr(module, "w13_weight", None)
        kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if weight is not None and weight.device.type == "cpu" and kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
