"""Makes random models of many architectures, small enough for a test."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import rlhf

TINY_POLICY = Path(rlhf.__file__).parent / "models" / "tiny_policy"
COMMON = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
}
GQA = COMMON | {"num_key_value_heads": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": GQA,
    "qwen2": GQA | {"tie_word_embeddings": True},
    "qwen3": GQA | {"head_dim": 4},
    "gemma": GQA | {"head_dim": 4},
    "mistral": GQA,
    "phi3": GQA | {"resid_pdrop": 0.1},
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.3,
        "bos_token_id": None,
    },
    "gpt_neox": COMMON | {"hidden_dropout": 0.1},
    # transformers has no token classifier for these.
    "olmo2": GQA,
    "gemma3_text": GQA | {"head_dim": 4},
    "granite": GQA,
    "opt": {
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 16,
    },
    # Not causal.
    "bert": COMMON,
    # Can't be packed: it adds its position biases (ALiBi) to the mask. (transformers 5.24 can pack GPT-J, used before.)
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 4},
    # Linear attention. It needs its kernels (flash-linear-attention) to keep packed sequences apart.
    "qwen3_5_text": GQA
    | {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": GQA | {"num_local_experts": 4},
    # More than ten experts, to test numeric instead of alphabetic order.
    "qwen3_moe": GQA | {"head_dim": 4, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}
"""Mixtures of experts: one tensor per expert in files, one for all experts in the model."""
CAUSAL = tuple(name for name in SETTINGS if name not in ("bert", "bloom", "qwen3_5_text"))


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tiny policy's tokenizer: 512 tokens, a chat template, a separate padding token."""
    return AutoTokenizer.from_pretrained(TINY_POLICY)


def tiny_config(architecture: str, **settings: Any) -> PretrainedConfig:
    """Return a configuration for `tiny_tokenizer`, changed by `settings`."""
    tokenizer = tiny_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    own = {"vocab_size": len(tokenizer)} | (SETTINGS | EXPERTS)[architecture]
    return AutoConfig.for_model(architecture, **own | ids | settings)


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save the model and the tokenizer in `folder`, and return `folder`."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def causal_lm(architecture: str, folder: Path, **settings: Any) -> PreTrainedModel:
    """Save a random float32 causal LM in `folder`; return it in eval mode."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **settings)).float().eval()
    save(model, folder)
    return model


def mixture(architecture: str, folder: Path, **settings: Any) -> PreTrainedModel:
    """Save and return a `causal_lm` of `EXPERTS`."""
    model = causal_lm(architecture, folder, **settings)
    assert any(".experts.3." in name for name in load_file(folder / "model.safetensors"))
    return model


def classifier(architecture: str, folder: Path, **settings: Any) -> PreTrainedModel:
    """Save a random float32 sequence classifier with one label in `folder`; return it in eval mode."""
    torch.manual_seed(2)
    config = tiny_config(architecture, **{"num_labels": 1} | settings)
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    save(model, folder)
    return model
