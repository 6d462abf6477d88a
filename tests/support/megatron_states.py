"""Converts a transformers model to Megatron's weights of a rank, with whole-tensor operations."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

Weights = dict[str, Tensor]


class StateLike:
    """Tensors by transformers' names, with the interface of a model that the functions above use."""

    def __init__(self, tensors: Weights, config: PretrainedConfig) -> None:
        self.tensors, self.config = tensors, config

    def state_dict(self) -> Weights:
        return self.tensors


Model = PreTrainedModel | StateLike


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
    model: Model, rank: int, ranks: int, stage: int, stages: int, chunks: int = 1, filler: float = 0.0
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


def save_ranks(model: Model, folder: Path, *, ranks: int = 1, stages: int = 1, chunks: int = 1, **beside: Any) -> None:
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


def reference(model: Model) -> dict[str, Tensor]:
    """Return Megatron's whole tensors; the name of a layer's tensor has the layer's number."""
    state = dict(model.state_dict())
    result = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        result["output_layer.weight"] = state["lm_head.weight"]
    for layer in range(model.config.num_hidden_layers):
        for name, value in tensor_parallel_part(whole_layer(state, layer, model.config), 0, 1).items():
            result[f"decoder.layers.{layer}.{name}"] = value
    return result


def stacked(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Stack the layers' tensors along a new first dimension."""
    result = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for name in [name for name in tensors if ".layers.0." in name]:
        of_layers = [tensors[name.replace(".0.", f".{layer}.", 1)] for layer in range(layers)]
        result[name.replace(".0.", ".", 1)] = torch.stack(of_layers)
    return result


def save_distributed(tensors: dict[str, Tensor], folder: Path, backend: str = "torch_dist") -> None:
    """Write a folder like megatron-core's, with the parts that the reader uses."""
    dcp.save({name: tensor.clone() for name, tensor in tensors.items()}, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))


def as_older_metadata(folder: Path) -> None:
    """Give `.metadata` the class that megatron-core 0.13 to 0.15 writes."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    found.mcore_data = {"optimizer.state.exp_avg.x": {"nd_reformulated_orig_global_shape": (4, 4)}}
    own, others = (
        f"c{name}\n".encode()
        for name in (
            "torch.distributed.checkpoint.metadata\nMetadata",
            "megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata",
        )
    )
    content = pickle.dumps(found, protocol=2)
    assert own in content
    (folder / ".metadata").write_bytes(content.replace(own, others))


class TrainedModel:
    """A model after three steps of AdamW, and its state: each of `weights`, `masters`, `exp_avg` and `exp_avg_sq` has
    `state_dict()` and `config` like a model, so that the functions above convert it."""

    steps = 3

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(self.steps):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_word_embeddings else {}
        self.masters = StateLike({name: tensor.clone() for name, tensor in model.state_dict().items()}, model.config)
        self.weights = StateLike({name: t.to(dtype) for name, t in self.masters.state_dict().items()}, model.config)
        self.exp_avg, self.exp_avg_sq = (
            StateLike({name: state[tied.get(name, name)][moment] for name in model.state_dict()}, model.config)
            for moment in ("exp_avg", "exp_avg_sq")
        )
        self.expected = {name: tensor for name, tensor in self.masters.state_dict().items() if name not in tied}
        self.expected_moments = {
            **{f"{name}.{key}": state[name][key] for name in state for key in ("exp_avg", "exp_avg_sq")},
            **{f"{name}.step": torch.tensor(float(self.steps)) for name in state},
        }


def save_ranks_of(trained: TrainedModel, folder: Path, *, ranks: int = 1, stages: int = 1, chunks: int = 1) -> None:
    """Write `mp_rank_XX_YYY/model_states.pt` with weights and the optimizer's state of all ranks, as Megatron-LM does
    with `--ckpt-format torch`: parameters with weight decay are numbered first, then vectors."""
    save_ranks(trained.weights, folder, ranks=ranks, stages=stages, chunks=chunks)
    for rank in range(ranks):
        for stage in range(stages):
            path = folder / f"mp_rank_{rank:02d}_{stage:03d}" / "model_states.pt"
            kinds = {
                kind: rank_weights(getattr(trained, kind), rank, ranks, stage, stages, chunks, filler=7.0)
                for kind in ("weights", "masters", "exp_avg", "exp_avg_sq")
            }
            content = torch.load(path, weights_only=True) | {"optimizer": _optimizer(kinds, trained.steps)}
            if content["optimizer"]["fp32_from_fp16_params"] is None:
                content["optimizer"] = content["optimizer"]["optimizer"]
            torch.save(content, path)


def _optimizer(kinds: dict[str, list[Weights]], steps: int) -> dict[str, Any]:
    named = [(chunk, name) for chunk, weights in enumerate(kinds["weights"]) for name in weights]
    matrices = [(chunk, name) for chunk, name in named if kinds["weights"][chunk][name].dim() > 1]
    groups = [matrices, [each for each in named if each not in matrices]]
    state: dict[int, Any] = {}
    numbered: list[list[int]] = []
    for group in groups:
        numbered.append([len(state) + number for number in range(len(group))])
        for chunk, name in group:
            moments = {kind: kinds[kind][chunk][name] for kind in ("exp_avg", "exp_avg_sq")}
            state[len(state)] = {"step": torch.tensor(float(steps)), **moments}
    decay = zip(numbered, (1.0, 0.0), strict=True)
    inner = {"state": state, "param_groups": [{"params": numbers, "wd_mult": wd} for numbers, wd in decay]}
    in_16_bits = kinds["weights"][0][named[0][1]].dtype != torch.float32
    masters = [[kinds["masters"][chunk][name] for chunk, name in group] for group in groups]
    return {"optimizer": inner, "fp32_from_fp16_params": masters if in_16_bits else None}
