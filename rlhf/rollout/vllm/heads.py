"""What vLLM's own reload of weights leaves undone."""

from torch import nn


def repack_heads(model: nn.Module) -> None:
    """On a CPU vLLM computes with packed copies of weights, and a head that is tied to the embeddings would keep its old one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)
