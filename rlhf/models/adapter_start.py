"""Fills new adapters from the run's seed or from a peft folder."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf.errors import UserError
from rlhf.models.adapter_config import PREFIX
from rlhf.models.adapter_folder import WEIGHTS
from rlhf.models.adapter_layers import A
from rlhf.storage.shards import Shard, Shards

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types allowed for adapter tensors, by their names in safetensors. Quantised types would need their scales."""


@torch.no_grad()
def fill_from_seed(shards: Shards, seed: int) -> None:
    """Fill this rank's slices of the adapters as peft does: A uniform (Kaiming, a = sqrt(5)), B zero.

    With B zero, the model's outputs equal the base model's. DoRA's magnitudes are zero here; the caller sets them.
    Values depend only on `seed` and the tensor's name, not on the number of ranks or the engine.
    """
    for name, shard in shards.items():
        if name.endswith(A):
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
            bound = 1 / math.sqrt(shard.shape[-1])
            copy_slice(shard, torch.empty(shard.shape).uniform_(-bound, bound, generator=generator))
        else:
            shard.local.zero_()


def check_adapter_tensors(shapes: Mapping[str, Sequence[int]], folder: Path) -> None:
    """Raise UserError unless the peft folder has the adapters in `shapes` and no others, in types of `FLOATS`."""
    prefix = f"model.lora.path={folder}: {WEIGHTS}"
    with _reading(folder) as (opened, stored):
        for name in sorted(shapes.keys() ^ stored.keys()):
            where = "has no" if name in shapes else "has an adapter that the settings do not ask for:"
            layers = ",".join(sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in stored}))
            raise UserError(f"{prefix} {where} {name}. Set the adapter's layers: model.lora.target_modules=[{layers}].")
        for name, shape in shapes.items():
            found = opened.get_slice(stored[name])
            if found.get_dtype() not in FLOATS:
                raise UserError(
                    f"{prefix}: {name} is {found.get_dtype()}, and adapters need {', '.join(FLOATS)}. Save "
                    f"{name} as one of these types."
                )
            if found.get_shape() != list(shape):
                raise UserError(
                    f"{prefix}: {name} has shape {found.get_shape()}, but the adapter of this model has {list(shape)}: "
                    "the base or the rank differs. Set model.path and model.lora.rank as in the adapter's training."
                )


@torch.no_grad()
def fill_from_folder(shards: Shards, folder: Path) -> None:
    """Fill this rank's slices of the adapters from a peft folder.

    Raises:
        UserError: as in `check_adapter_tensors`, or if a value is not finite.
    """
    check_adapter_tensors({name: shard.shape for name, shard in shards.items()}, folder)
    with _reading(folder) as (opened, stored):
        for name, shard in shards.items():
            whole = opened.get_tensor(stored[name])
            if not whole.isfinite().all():
                raise UserError(
                    f"model.lora.path={folder}: {WEIGHTS} has values in {name} that are not finite, so the adapter's "
                    "training failed. Use an earlier adapter."
                )
            copy_slice(shard, whole)


@contextmanager
def _reading(folder: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open the folder's weights; yield the file, and its tensor names keyed by the names in checkpoints."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as opened:
            names = list(opened.keys())
            stored = {name.removeprefix(PREFIX): name for name in names}
            if len(stored) < len(names):
                raise UserError(
                    f"model.lora.path={folder}: {WEIGHTS} has adapters twice, with and without {PREFIX!r} before their "
                    "names. Save the adapter with peft."
                )
            yield opened, stored
    except (OSError, SafetensorError) as error:
        raise UserError(f"model.lora.path={folder}: {WEIGHTS} can't be read: {error}. Restore the file.") from error


def copy_slice(shard: Shard, whole: Tensor) -> None:
    """Copy this rank's slice of `whole` into `shard`."""
    shard.local.copy_(shard.cut(whole))
