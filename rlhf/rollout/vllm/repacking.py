"""Repacks weights that vLLM packs on a CPU but does not repack on a reload."""

from typing import Any

from torch import nn


def repack(model: nn.Module) -> None:
    repack_heads(model)
    repack_experts(model)


def repack_heads(model: nn.Module) -> None:
    """Pack heads again: a head that is tied to embeddings would keep its old copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)


def repack_experts(model: nn.Module) -> None:
    """Pack experts: vLLM packs only at the first load, and would use reloaded experts as if packed."""
    for module in model.modules():
        weight = getattr(module, "w13_weight", None)
        kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if weight is not None and weight.device.type == "cpu" and kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
