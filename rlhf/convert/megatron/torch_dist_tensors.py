"""Finds the tensors of layers in a `torch_dist` folder, which stacks them or stores each layer by itself."""

import math
from collections.abc import Mapping
from itertools import product

from torch import Tensor

from rlhf.convert.bands import Band, bands_of, read_bands
from rlhf.convert.dcp.dcp_files import DcpFolder
from rlhf.convert.megatron.megatron_model import LAYERS
from rlhf.models.hf.named_tensors import JoinedTensor
from rlhf.models.hf.source import FunctionTensor, ReadableTensor, TensorInfo
from rlhf.storage.disk_errors import DamagedCheckpoint

GATE, UP = "_w", "_v"
"""Suffixes of the two halves of `linear_fc1`, if the folder has them as separate tensors."""


def stored_tensor(folder: DcpFolder, name: str) -> FunctionTensor:
    return FunctionTensor(folder.tensors[name], lambda start, stop: folder.read(name, start, stop))


def unflattened(folder: DcpFolder, name: str, like: TensorInfo | None) -> ReadableTensor:
    """Return the tensor `name`. If the folder stores it flattened, return it in the shape of the weight `like`.

    Up to megatron-core 0.15, format `fully_sharded_model_space` stores a tensor [X, Y] with blocks [x, y], one per
    rank, in the shape [X // x, Y // y, x * y].
    """
    flat = stored_tensor(folder, name)
    *grid, block = flat.info.shape or (0,)
    if like is None or len(grid) != len(like.shape) or not all(grid):
        return flat
    sizes = tuple(size // count for size, count in zip(like.shape, grid, strict=True))
    if math.prod(sizes) != block or flat.info.numel != like.numel:
        return flat
    whole = TensorInfo(like.shape, flat.info.dtype)
    bands: list[Band] = []
    for number, index in enumerate(product(*map(range, grid))):
        offsets = tuple(at * size for at, size in zip(index, sizes, strict=True))
        bands += bands_of(whole.shape, offsets, sizes, _part(flat, TensorInfo(sizes, whole.dtype), number * block))

    def read(start: int, stop: int) -> Tensor:
        if (found := read_bands(bands, whole, start, stop)) is None:
            raise DamagedCheckpoint(f"{folder.path} does not have all parts of {name}")
        return found

    return FunctionTensor(whole, read)


def by_layer(stored: Mapping[str, ReadableTensor]) -> dict[str, list[ReadableTensor]]:
    """Return lists of one tensor each, by Megatron's names with the number of the layer."""
    parts: dict[str, list[ReadableTensor]] = {}
    for name, tensor in stored.items():
        rest, info = name.removeprefix(LAYERS), tensor.info
        if rest == name or rest.partition(".")[0].isdigit():
            parts[name] = [tensor]
            continue
        one = TensorInfo(info.shape[1:], info.dtype)
        for layer in range(info.shape[0] if info.shape else 0):
            parts[f"{LAYERS}{layer}.{rest}"] = [_part(tensor, one, layer * one.numel)]
    for name in [name for name in parts if name.endswith(GATE) and name.removesuffix(GATE) + UP in parts]:
        _join_halves(parts, name.removesuffix(GATE))
    return parts


def _part(tensor: ReadableTensor, info: TensorInfo, first: int) -> FunctionTensor:
    """Return the tensor that begins at element `first` of another tensor."""
    return FunctionTensor(info, lambda start, stop: tensor.read(first + start, first + stop))


def _join_halves(parts: dict[str, list[ReadableTensor]], name: str) -> None:
    halves = [parts.pop(name + GATE)[0], parts.pop(name + UP)[0]]
    (_, *rest), dtype = halves[0].info.shape, halves[0].info.dtype
    info = TensorInfo((sum(half.info.shape[0] for half in halves), *rest), dtype)
    parts[name] = [JoinedTensor(info, [(half, 0, half.info.numel) for half in halves])]
