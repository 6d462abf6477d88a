"""Lays out right-padded sequences for a model: packed into one row without padding, or padded."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf.models.sequence_attention import BY_SEQUENCE, runs_of
from rlhf.models.token_values import HEADS

FLASH = "flash_attention_2"


@dataclass(frozen=True)
class TokenRows:
    """Model inputs for several sequences, and the positions of the sequences in the output.

    `use_cache` is always False: with a cache, transformers silently lets packed sequences attend to each other.
    """

    inputs: dict[str, Any]  # arguments of the model's `forward`
    starts: Tensor  # [N] int64: first token of each sequence in the flattened output positions


def lay_out(model: nn.Module, ids: Tensor, lengths: ArrayLike) -> TokenRows:
    """Lay out the first `lengths` [N] tokens of each row of `ids` [N, L]: packed if `pack` was called, else padded.

    Padding needs no mask: with causal attention, a real token never attends to padding on its right. `lengths` are on
    the host, so that the host computes shapes without waiting for the device.
    """
    device, width = ids.device, ids.shape[1]
    if not is_packed(model):
        return TokenRows({"input_ids": ids, "use_cache": False}, torch.arange(len(ids), device=device) * width)
    # Sequences of equal length are adjacent, so that attention computes them together.
    sizes = np.asarray(lengths)
    order = sizes.argsort(kind="stable")
    ends = sizes[order].cumsum()
    starts = np.empty_like(ends)
    starts[order] = ends - sizes[order]
    # [3, N]: number, length and start of each sequence, in one transfer. Below, repeat them for each token.
    numbers = torch.from_numpy(np.stack([order, sizes[order], ends - sizes[order]])).to(device, non_blocking=True)
    total = int(ends[-1])
    rows, _, before = numbers.repeat_interleave(numbers[1], dim=1, output_size=total)
    positions = torch.arange(total, device=device) - before
    bounds = nn.functional.pad(numbers[1:].sum(dim=0), (1, 0)).int()
    inputs: dict[str, Any] = {
        "input_ids": ids[rows, positions][None],
        "position_ids": positions[None],
        "attention_mask": None,
        "use_cache": False,
        # Flash attention and the kernels of linear attention read these four arguments.
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": width,
        "max_length_k": width,
    }
    if _config(model)._attn_implementation != FLASH:
        inputs["sequence_runs"] = runs_of(sizes[order].tolist())
    return TokenRows(inputs, torch.from_numpy(starts).to(device, non_blocking=True))


def pack(model: nn.Module) -> None:
    """Make `lay_out` pack for `model` (or an engine's wrapper), with attention that separates packed sequences.

    `rlhf.models.packing_probe` checks whether the rest of the model separates them.
    """
    config = _config(model)
    config._attn_implementation = BY_SEQUENCE.get(config._attn_implementation, config._attn_implementation)
    model.packs = True  # type: ignore[assignment]


def unpack(model: nn.Module) -> None:
    config = _config(model)
    plain = {name: given for given, name in BY_SEQUENCE.items()}
    config._attn_implementation = plain.get(config._attn_implementation, config._attn_implementation)
    model.packs = False  # type: ignore[assignment]


def is_packed(model: nn.Module) -> bool:
    return bool(getattr(model, "packs", False))


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the KV cache argument of a model's `forward`; transformers 5.24 renamed this argument."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def transformers_model(model: nn.Module) -> PreTrainedModel:
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the layer that computes logits, values or scores, if it has transformers' usual name."""
    inner = transformers_model(model)
    head: nn.Module | None = inner.get_output_embeddings()
    return head or next((getattr(inner, name) for name in HEADS if hasattr(inner, name)), None)


def _config(model: nn.Module) -> PretrainedConfig:
    return transformers_model(model).config
