"""Assembles ranges of tensors that are sharded over the files of ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.convert.bands import bands_of, read_bands
from rlhf.convert.fsdp.fsdp_files import fields_of
from rlhf.convert.stored_tensor import StoredTensor, StoredWrapper
from rlhf.errors import UserError
from rlhf.models.hf.source import TensorInfo
from rlhf.storage.disk_errors import DamagedCheckpoint


@dataclass(frozen=True)
class StoredBox:
    """A part of a tensor in a file; `begin` is the position of the part's first element in the tensor."""

    begin: tuple[int, ...]
    stored: StoredTensor


@dataclass(frozen=True)
class AssembledTensor:
    """A tensor whose elements are all in `boxes`."""

    info: TensorInfo
    boxes: Sequence[StoredBox]

    def read(self, start: int, stop: int) -> Tensor:
        shape, boxes = self.info.shape, self.boxes
        if len(boxes) == 1:
            return boxes[0].stored.read(start, stop)
        bands = (band for box in boxes for band in bands_of(shape, box.begin, box.stored.shape, box.stored))
        if (found := read_bands(bands, self.info, start, stop)) is None:
            raise DamagedCheckpoint(f"{boxes[0].stored.path}: the ranks' parts do not form a tensor of {shape}")
        return found


@dataclass(frozen=True)
class ReplicatedTensor:
    """A tensor that every rank saved whole, such as a buffer. A read compares all copies."""

    name: str
    info: TensorInfo
    copies: Sequence[StoredTensor]

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), flattened, 1-D. Raises DamagedCheckpoint when the ranks differ."""
        result = self.copies[0].read(start, stop)
        for copy in self.copies[1:]:
            if not torch.equal(copy.read(start, stop).view(torch.uint8), result.view(torch.uint8)):
                raise DamagedCheckpoint(f"{self.name} differs between {self.copies[0].path} and {copy.path}")
        return result


def assemble(name: str, of_ranks: Sequence[Any]) -> AssembledTensor | ReplicatedTensor:
    """Assemble the tensor `name` from the parts of all ranks, in order: DTensors, ShardedTensors, or plain tensors.
    Raises DamagedCheckpoint when parts are missing or overlap, UserError for a split that FSDP does not make."""
    kinds = {part.kind if isinstance(part, StoredWrapper) else type(part).__name__ for part in of_ranks}
    if kinds == {"DTensor"}:
        whole = _of_shards(name, [DTensorPart.of(part, name) for part in of_ranks])
    elif kinds == {"ShardedTensor"}:
        whole = _of_sharded_tensors(name, of_ranks)
    elif all(isinstance(part, StoredTensor) for part in of_ranks):
        shapes = {(part.shape, part.dtype) for part in of_ranks}
        if len(shapes) > 1:
            raise DamagedCheckpoint(f"{name} has different shapes on different ranks: {sorted(map(str, shapes))}")
        return ReplicatedTensor(name, TensorInfo(of_ranks[0].shape, of_ranks[0].dtype), of_ranks)
    else:
        raise DamagedCheckpoint(f"{name} is not a tensor on all ranks: {', '.join(sorted(kinds))}")
    boxes = [box for box in whole.boxes if box.stored.numel] or whole.boxes[:1]
    if len({box.begin for box in boxes}) < len(boxes) or sum(box.stored.numel for box in boxes) != whole.info.numel:
        raise DamagedCheckpoint(f"{name}: the ranks' parts do not form a tensor of {whole.info.shape}")
    return AssembledTensor(whole.info, boxes)


@dataclass(frozen=True)
class DTensorPart:
    """One rank's part of a DTensor.

    `coordinates` is the rank's position in the device mesh. `splits` has one entry per mesh dimension: the tensor
    dimension that the mesh dimension shards, or None for a replicating mesh dimension. `rank` is the rank that saved
    the part, None if unknown.
    """

    shape: tuple[int, ...]
    local: StoredTensor
    coordinates: tuple[int, ...]
    splits: tuple[int | None, ...]
    rank: int | None = None

    @classmethod
    def of(cls, part: StoredWrapper, name: str) -> "DTensorPart":
        """Read a part from its pickled DTensor. Raises UserError for a placement that FSDP does not use."""
        try:
            local, spec = fields_of(part)["_local_tensor"], fields_of(fields_of(part)["_spec"])
            mesh = fields_of(spec["mesh"])
            coordinates = tuple(map(int, mesh["_coordinate_on_dim"]))
            rank = None if mesh.get("_rank") is None else int(mesh["_rank"])
            placements = [(type(p).__name__, [*fields_of(p).values(), *p.arguments]) for p in spec["placements"]]
            splits = tuple(int(values[0]) if kind == "Shard" else None for kind, values in placements)
            path = local.path
        except (KeyError, TypeError, IndexError, AttributeError, ValueError):
            raise DamagedCheckpoint(f"{name}: the DTensor does not describe its sharding") from None
        if odd := [kind for kind, _ in placements if kind not in ("Shard", "Replicate")]:
            raise UserError(f"{path} has tensors with placement {odd[0]}, which is not supported. Save it with FSDP.")
        return cls(part.shape, local, coordinates, splits, rank)

    @property
    def is_copy(self) -> bool:
        """Whether another rank, at coordinate 0 of the replicating mesh dimensions, has the same part."""
        return any(at for at, split in zip(self.coordinates, self.splits, strict=True) if split is None)

    def place(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offset and shape of this rank's part in the whole tensor, in a mesh of these `sizes`."""
        begin, extent = [0] * len(self.shape), list(self.shape)
        for at, count, split in zip(self.coordinates, sizes, self.splits, strict=True):
            if split is not None:
                chunk = -(-extent[split] // count)
                low = min(at * chunk, extent[split])
                begin[split], extent[split] = begin[split] + low, min(chunk, extent[split] - low)
        return tuple(begin), tuple(extent)


def _of_shards(name: str, parts: Sequence[DTensorPart]) -> AssembledTensor:
    first = parts[0]
    for number, part in enumerate(parts):
        if part.rank not in (None, number):
            raise DamagedCheckpoint(
                f"{part.local.path} was saved by rank {part.rank}: the ranks' files are mixed up. Rename each file "
                "after its rank, or copy the files again."
            )
        if (part.shape, part.local.dtype, part.splits) != (first.shape, first.local.dtype, first.splits):
            raise DamagedCheckpoint(f"{name} is sharded differently in {part.local.path} and {first.local.path}")
    sizes = [1 + max(at) for at in zip(*(part.coordinates for part in parts), strict=True)]
    boxes = []
    for part in parts:
        begin, extent = part.place(sizes)
        stored = part.local.shape if part.local.numel else extent
        if stored != extent or part.local.numel != math.prod(extent):
            raise DamagedCheckpoint(f"{part.local.path}: the part of {name} is {part.local.shape}, not {extent}")
        if not part.is_copy:
            boxes.append(StoredBox(begin, part.local))
    return AssembledTensor(TensorInfo(first.shape, first.local.dtype), boxes)


def _of_sharded_tensors(name: str, tensors: Sequence[StoredWrapper]) -> AssembledTensor:
    boxes = []
    try:
        size = tuple(fields_of(tensors[0].state[1])["size"])
        for tensor in tensors:
            for shard in map(fields_of, tensor.state[0]):
                stored, place = shard["tensor"], fields_of(shard["metadata"])
                begin, extent = tuple(place["shard_offsets"]), tuple(place["shard_sizes"])
                fits = all(0 <= at <= at + n <= whole for at, n, whole in zip(begin, extent, size, strict=True))
                if stored.shape != extent or not fits:
                    raise DamagedCheckpoint(f"{stored.path}: the part of {name} is {stored.shape}, not {extent}")
                boxes.append(StoredBox(begin, stored))
        return AssembledTensor(TensorInfo(size, boxes[0].stored.dtype), boxes)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError):
        raise DamagedCheckpoint(f"{name}: the ShardedTensor does not describe its sharding") from None
