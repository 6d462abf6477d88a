"""Maps torchtitan's parameter names to transformers', and finds weights whose rows torchtitan orders differently."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import UserError

EMBEDDING = "tok_embeddings.weight"
"""A tensor that every torchtitan language model has, but no transformers model has."""
TOP = {
    EMBEDDING: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
TABLES = ("freqs_cis", "rope_cache")
"""Rotary embedding tables, which older torchtitan releases save and transformers computes."""
MODELS = {"llama": True, "qwen3": False}
"""Maps `model_type` in config.json to whether torchtitan applies rotary embeddings to pairs of neighbouring rows, as
Meta does. transformers pairs row i of a head's first half with row i of its second half."""


def to_transformers(name: str, config: Mapping[str, Any], where: Path) -> str | None:
    """Return a parameter's name in transformers; None for a table that transformers computes. Raises UserError for an
    unknown model and for parts that known models lack (experts, fused projections)."""
    model = config.get("model_type")
    if model not in MODELS:
        raise UserError(
            f"{where} is a torchtitan checkpoint of {model!r} (config.json); {' and '.join(MODELS)} are supported. "
            "Convert it with torchtitan's scripts/checkpoint_conversion/convert_to_hf.py."
        )
    if name in TABLES:
        return None
    # Newer torchtitan releases put wq, wk and wv into a separate module, `qkv_linear`.
    found = TOP.get(name)
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name.replace(".qkv_linear.", ".")):
        found = f"model.layers.{match[1]}.{LAYER[match[2]]}" if match[2] in LAYER else None
    if found is None:
        raise UserError(
            f"{where} has {name}, which is not part of torchtitan's dense {model}. Convert it with torchtitan's "
            "scripts/checkpoint_conversion/convert_to_hf.py."
        )
    return found


def rotated_rows(name: str, config: Mapping[str, Any]) -> int:
    """Return the rows per head of transformers' parameter `name` if torchtitan orders them differently, else 0."""
    if not MODELS[config["model_type"]] or not name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
        return 0
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
