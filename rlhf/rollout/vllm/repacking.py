"""Repacking of weights with whose packed copies vLLM computes on a CPU, and which its own reload leaves out."""

from typing import Any

from torch import nn


def repack(model: nn.Module) -> None:
    """Pack anew what a reload has left as it was, or unpacked."""
    repack_heads(model)
    repack_experts(model)


def repack_heads(model: nn.Module) -> None:
    """Pack heads anew: one that is tied to embeddings keeps its old copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)


def repack_experts(model: nn.Module) -> None:
    """Pack experts, which vLLM does at the first load alone: after a reload it would take unpacked ones for packed."""
    for module in model.modules():
        weight = getattr(module, "w13_weight", None)
        kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if weight is not None and weight.device.type == "cpu" and kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
