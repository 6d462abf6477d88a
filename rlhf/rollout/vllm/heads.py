"""Repacking of heads, which vLLM's own reload of weights leaves out."""

from torch import nn


def repack_heads(model: nn.Module) -> None:
    """Pack heads anew: on a CPU vLLM computes with packed copies, and one that is tied to embeddings keeps its old."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)
