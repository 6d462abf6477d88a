"""Computes logits of open checkpoints on a few rows of tokens with transformers' own model."""

import copy
from pathlib import Path

import torch
from torch import Tensor

from rlhf.convert.huggingface.layout_huggingface import NAME as HUGGING_FACE
from rlhf.models.hf.architecture import Architecture
from rlhf.models.hf.hf_folder import ranges_of
from rlhf.models.hf.source import TensorInfo, TensorSource

ROW_TOKENS = 16
Opened = tuple[TensorSource, Path]
"""An open checkpoint and its folder."""


def largest_difference(a: Opened, b: Opened, architecture: Architecture, rows: int) -> float:
    """Return the largest absolute difference of two checkpoints' logits on `rows` rows; NaN if a logit is NaN.

    One model at a time is in memory. transformers opens a Hugging Face folder with the folder's own configuration, and
    any other checkpoint with the configuration of `architecture`.
    """
    vocabulary = architecture.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, (rows, ROW_TOKENS), generator=torch.Generator().manual_seed(0))
    of_a, of_b = (_logits(*opened, architecture, tokens).double() for opened in (a, b))
    return float((of_a - of_b).abs().masked_fill(of_a == of_b, 0.0).max())


@torch.no_grad()
def _logits(source: TensorSource, folder: Path, architecture: Architecture, tokens: Tensor) -> Tensor:
    """Return logits [rows, ROW_TOKENS, vocabulary], on the CPU in the dtype of the weights. A value model returns one
    value per token."""
    dtypes = [info.dtype for info in source.contents.tensors.values() if info.dtype.is_floating_point]
    # Do not trust config.json: in verl's FSDP checkpoints, it has the base model's dtype.
    dtype = max(set(dtypes), key=dtypes.count)
    if source.layout == HUGGING_FACE:
        model = architecture.kind.from_pretrained(folder, dtype=dtype)
    else:
        tensors = {name: _whole(source, name, info) for name, info in source.contents.tensors.items()}
        config = copy.deepcopy(architecture.config)
        model = architecture.kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
    return model.eval()(input_ids=tokens, use_cache=False).logits


def _whole(source: TensorSource, name: str, info: TensorInfo) -> Tensor:
    tensor = torch.empty(info.numel, dtype=info.dtype)
    for _, start, stop in ranges_of({name: info}):
        tensor[start:stop] = source.read(name, start, stop)
    return tensor.view(info.shape)
