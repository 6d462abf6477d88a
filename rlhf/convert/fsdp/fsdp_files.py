"""Finds and loads the files of verl's FSDP ranks, with a list of the classes that their pickles may use."""

import json
import re
from pathlib import Path
from typing import Any

from rlhf.convert.pickles import Allowed, StandIn, TensorStandIn, stand_in
from rlhf.convert.stored_tensor import StoredWrapper, open_mapping
from rlhf.errors import UserError
from rlhf.models.hf.source import Origin
from rlhf.storage.disk_errors import DamagedCheckpoint

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
FSDP_CONFIG = "fsdp_config.json"
MODEL_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
RANK_FILE = re.compile(rf"(?:{MODEL}|{OPTIMIZER}|{EXTRA})_world_size_(\d+)_rank_(\d+)\.pt")


class _Nested(StandIn):
    """Stand-in for an object of a nested class."""


def _nested(_owner: Any, _name: str) -> type[_Nested]:
    """Return a stand-in. Replaces `getattr`, which pickles of Python 3.11 call for nested classes and enum members."""
    return _Nested


# DTensors and ShardedTensors as torch 2.4 to 2.13 pickles them, and numpy's random state. StandIns replace them all: a
# real DTensor, for example, would need a process group.
ALLOWED: Allowed = [
    *(
        stand_in(f"torch.distributed.{name}", TensorStandIn)
        for name in (
            "tensor.DTensor",
            "tensor._api.DTensor",
            "_tensor.api.DTensor",
            "_shard.sharded_tensor.api.ShardedTensor",
        )
    ),
    *(
        stand_in(f"torch.distributed.{name}")
        for name in (
            "device_mesh.DeviceMesh",
            "_mesh_layout._MeshLayout",
            "_mesh_layout._FlatLayout",
            *(
                f"{module}.{kind}"
                for module in ("tensor._dtensor_spec", "_tensor._dtensor_spec", "_tensor.placement_types")
                for kind in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
            ),
            *(
                f"{module}.placement_types.{kind}"
                for module in ("tensor", "_tensor")
                for kind in ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard")
            ),
            "_shard.sharded_tensor.api.ProcessGroupState",
            "_shard.sharded_tensor.shard.Shard",
            "_shard.sharded_tensor.metadata.ShardedTensorMetadata",
            "_shard.sharded_tensor.metadata.TensorProperties",
            "_shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
            "_shard.metadata.ShardMetadata",
            "_shard.sharding_spec.api.EnumerableShardingSpec",
            "_shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
            "remote_device._remote_device",
        )
    ),
    (_nested, "builtins.getattr"),
    _Nested,
    *(
        stand_in(f"numpy.{name}")
        for name in ("ndarray", "dtype", "_core.multiarray._reconstruct", "core.multiarray._reconstruct")
    ),
]


def find_folder(origin: Origin) -> Path | None:
    """Return the folder with the model's files: `origin` itself, or the role's folder in it."""
    for folder in (origin.path, origin.path / origin.role):
        if folder.is_dir() and any(MODEL_FILE.fullmatch(path.name) for path in folder.iterdir()):
            return folder
    return None


def world_size_of(folder: Path) -> int:
    """Return the number of ranks that saved, from fsdp_config.json, or else from the file names."""
    found = sorted({int(match[1]) for path in folder.iterdir() if (match := MODEL_FILE.fullmatch(path.name))})
    path = folder / FSDP_CONFIG
    if path.is_file():
        try:
            world_size = int(json.loads(path.read_bytes())["world_size"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DamagedCheckpoint(f"{path} has no world_size") from None
        if world_size not in found:
            raise UserError(
                f"{path} has world_size {world_size}, but the folder has files of {' and '.join(map(str, found))} "
                f"ranks. Copy the files model_world_size_{world_size}_rank_*.pt into {folder}."
            )
        return world_size
    if len(found) > 1:
        raise UserError(
            f"{folder} has files of {' and '.join(map(str, found))} ranks, and no {FSDP_CONFIG} to choose between "
            "them. Remove the files of the other save."
        )
    return found[0]


def paths_of(folder: Path, kind: str, world_size: int) -> list[Path]:
    """Return the paths of one kind of file, of every rank, whether they exist or not."""
    return [folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size)]


def missing_among(paths: list[Path]) -> str:
    """Return the names of up to four missing files, and how many more are missing; empty if no file is missing."""
    missing = [path.name for path in paths if not path.is_file()]
    return ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")


def check_no_others(folder: Path, world_size: int) -> None:
    """Raise UserError if `folder` also has a file of a save with another number of ranks."""
    for path in sorted(folder.iterdir()):
        match = RANK_FILE.fullmatch(path.name)
        if match and (int(match[1]) != world_size or int(match[2]) >= world_size):
            raise UserError(f"{folder} was saved by {world_size} ranks, but {path.name} by another save. Remove it.")


def open_ranks(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Load the model files of all ranks, with a StoredTensor for each tensor. Raises UserError, which names the file,
    for a missing file or a file of another save."""
    check_no_others(folder, world_size)
    paths = paths_of(folder, MODEL, world_size)
    if missing := missing_among(paths):
        raise UserError(
            f"{folder} was saved by {world_size} ranks and lacks {missing}. Copy the missing files into it: every node "
            "has the files of its own ranks."
        )
    return [open_mapping(path, ALLOWED, "verl") for path in paths]


def fields_of(made: StandIn | StoredWrapper) -> dict[str, Any]:
    """Return the attributes of the pickled object, from its dictionary or its slots."""
    states = made.state if isinstance(made.state, tuple) else (made.state,)
    return {name: value for state in states if isinstance(state, dict) for name, value in state.items()}
