"""Values that adapters begin with: from the run's seed, or from a folder of peft's."""

import math
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf.errors import UserError
from rlhf.models.adapter_config import PREFIX
from rlhf.models.adapter_folder import WEIGHTS
from rlhf.models.adapter_layers import A
from rlhf.storage.shards import Shard, Shards


@torch.no_grad()
def fill_from_seed(shards: Shards, seed: int) -> None:
    """Fill this rank's part of the adapters as peft does: A uniform (Kaiming, a = sqrt(5)), B zero, so that the model
    is what it is without them; magnitudes are left.

    The values follow from `seed` and the tensor's name alone, whatever the ranks and the engine.
    """
    for name, shard in shards.items():
        if name.endswith(A):
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
            bound = 1 / math.sqrt(shard.shape[-1])
            put(shard, torch.empty(shard.shape).uniform_(-bound, bound, generator=generator))
        else:
            shard.local.zero_()


@torch.no_grad()
def fill_from_folder(shards: Shards, folder: Path) -> None:
    """Fill this rank's part of the adapters from a folder of peft's.

    Raises:
        UserError: the folder's adapters are of other layers or shapes.
    """
    file = folder / WEIGHTS
    said = f"model.lora.path={folder}"
    try:
        with safe_open(file, framework="pt") as opened:
            stored = {name.removeprefix(PREFIX): name for name in opened.keys()}  # noqa: SIM118
            for name in sorted(shards.keys() ^ stored.keys()):
                where = "has no" if name in shards else "has an adapter that the settings do not ask for:"
                raise UserError(f"{said}: {where} {name}. Set model.lora.target_modules as they were for that adapter.")
            for name, shard in shards.items():
                whole = opened.get_tensor(stored[name])
                if tuple(whole.shape) != tuple(shard.shape):
                    raise UserError(
                        f"{said}: {name} has shape {list(whole.shape)}, the adapter of this model "
                        f"{list(shard.shape)}: it is of another base than model.path, or of another rank."
                    )
                put(shard, whole)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{said}: {WEIGHTS} can't be read: {error}. Restore it.") from error


def put(shard: Shard, whole: Tensor) -> None:
    """Copy this rank's range of `whole` into `shard`."""
    part = whole.reshape(-1)[shard.start : shard.start + shard.local.numel()]
    shard.local.copy_(part.view(shard.local.shape))
