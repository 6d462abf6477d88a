"""Converts a transformers model to Megatron's weights of a rank, with whole-tensor operations."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

Weights = dict[str, Tensor]


def whole_layer(state: Weights, layer: int, config: PretrainedConfig) -> Weights:
    """Return a layer under Megatron's names, with q, k and v split by key-value head, and gate and up split."""
    own = {name.split(f"layers.{layer}.")[1]: value for name, value in state.items() if f".layers.{layer}." in name}
    groups = config.num_key_value_heads
    result = {
        "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
        "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.stack([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]),
        "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            of_group = [own[f"self_attn.{name}_proj.{kind}"].unflatten(0, (groups, -1)) for name in "qkv"]
            result[f"self_attention.linear_qkv.{kind}"] = torch.cat(of_group, dim=1)
    for name in "qk":
        if f"self_attn.{name}_norm.weight" in own:
            result[f"self_attention.{name}_layernorm.weight"] = own[f"self_attn.{name}_norm.weight"]
    return result


def tensor_parallel_part(layer: Weights, rank: int, ranks: int) -> Weights:
    """Return a tensor parallel rank's part of a layer."""
    result = {}
    for name, value in layer.items():
        if "linear_qkv" in name and "layer_norm" not in name:
            value = value.chunk(ranks)[rank].flatten(0, 1)
        elif name == "mlp.linear_fc1.weight":
            value = value.chunk(ranks, dim=1)[rank].flatten(0, 1)
        elif name in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
            value = value.chunk(ranks, dim=1)[rank]
        result[name] = value.contiguous().clone()
    return result


def padded(vocabulary: Tensor, rank: int, ranks: int, filler: float) -> Tensor:
    """Return a rank's rows of a vocabulary padded with `filler` like Megatron-LM's."""
    missing = -len(vocabulary) % (128 * ranks)
    padding = torch.full((missing, *vocabulary.shape[1:]), filler, dtype=vocabulary.dtype)
    return torch.cat([vocabulary, padding]).chunk(ranks)[rank].clone()


def rank_weights(
    model: PreTrainedModel, rank: int, ranks: int, stage: int, stages: int, chunks: int = 1, filler: float = 0.0
) -> list[Weights]:
    """Return the weights of each virtual pipeline stage of a rank."""
    state, config = dict(model.state_dict()), model.config
    per_chunk = config.num_hidden_layers // (stages * chunks)
    result = []
    for chunk in range(chunks):
        weights: Weights = {}
        if (stage, chunk) == (0, 0):
            embedding = padded(state["model.embed_tokens.weight"], rank, ranks, filler)
            weights["embedding.word_embeddings.weight"] = embedding
        for local in range(per_chunk):
            layer = (chunk * stages + stage) * per_chunk + local
            for name, value in tensor_parallel_part(whole_layer(state, layer, config), rank, ranks).items():
                weights[f"decoder.layers.{local}.{name}"] = value
        if (stage, chunk) == (stages - 1, chunks - 1):
            weights["decoder.final_layernorm.weight"] = state["model.norm.weight"].clone()
            if "score.weight" in state:
                weights |= {f"output_layer.{kind}": state[f"score.{kind}"].clone() for kind in ("weight", "bias")}
            elif not config.tie_word_embeddings or stages > 1:
                weights["output_layer.weight"] = padded(state["lm_head.weight"], rank, ranks, filler)
        result.append(weights)
    return result


def save_ranks(
    model: PreTrainedModel, folder: Path, *, ranks: int = 1, stages: int = 1, chunks: int = 1, **beside: Any
) -> None:
    """Write `mp_rank_XX_YYY/model_states.pt` of all ranks, with Megatron-LM's other entries `beside` the weights."""
    for stage in range(stages):
        for rank in range(ranks):
            weights: list[dict[str, Any]] = list(rank_weights(model, rank, ranks, stage, stages, chunks, filler=7.0))
            for chunk in weights:
                chunk["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
            content = {f"model{number}": chunk for number, chunk in enumerate(weights)}
            place = folder / f"mp_rank_{rank:02d}_{stage:03d}"
            place.mkdir(parents=True)
            torch.save((content if chunks > 1 else {"model": weights[0]}) | beside, place / "model_states.pt")
