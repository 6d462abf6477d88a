"""Loads weights from files into a sharded model; each rank has only its shards and one bucket in memory."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlhf.errors import UserError
from rlhf.models.fused_experts import fuse_experts
from rlhf.models.model_files import ModelFiles, as_user_errors, on_every_rank
from rlhf.models.skeleton import skeleton
from rlhf.ranks.collectives import broadcast
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.boxes import bounds, layout_of, overlaps, range_box
from rlhf.storage.file_parts import FileParts, parts_of
from rlhf.storage.shards import DTYPES, Shards, strided_view

BUCKET_BYTES = 1 << 26  # bytes per read and per broadcast, or more for a longer row, because rows are not split

NEEDS_TRANSFORMERS = ("quantization_config", "transformers_weights", "extra_files")
"""Settings in config.json with which transformers reads other files or changes the tensors."""

Load = Callable[[Mapping[str, Tensor] | None], PreTrainedModel]
"""A `load_...` function of `loading.py` that already has all its arguments except `tensors`."""


class ReaderFailed(Exception):
    """The rank that reads the files for all ranks failed. That rank raises the cause."""


class PendingModel:
    """A model whose weights `fill` loads, after an engine has sharded it.

    Before `fill`, the parameters of `model` are on the meta device, and its buffers in memory. If only transformers can
    read the files, `model` already has its weights, and `fill` loads nothing.
    """

    def __init__(self, model: PreTrainedModel, parts: FileParts, reader: "ModelReader") -> None:
        self.model = model
        self._parts, self._reader = parts, reader

    def fill(self, shards: Shards) -> None:
        """Load the weights into `shards`, this rank's part of the model. Collective.

        Raises:
            UserError: on every rank, if a file cannot be read.
        """
        on_every_rank(lambda: self._fill(shards), self._reader.coordinator)
        self._reader.close()

    @torch.no_grad()
    def _fill(self, shards: Shards) -> None:
        with contextlib.suppress(ReaderFailed):
            for name, shard in shards.items():
                first, stop = bounds(shard.box, shard.shape)
                for part in self._parts.get(name, ()):  # a new head has no tensor in the files
                    for start, chunk in self._reader.chunks(part.name, first - part.start, stop - part.start):
                        begin = part.start + start
                        read = range_box(begin, begin + chunk.numel())
                        for common in overlaps(shard.box, read, shard.shape):
                            shard.at(common).copy_(strided_view(chunk, layout_of(common, read, shard.shape)))


class ModelReader:
    """Reads ranges of tensors from a model's files, or receives them from the rank that reads for all."""

    def __init__(self, files: ModelFiles, coordinator: Coordinator, device: torch.device) -> None:
        self.coordinator = coordinator
        self._files, self._device = files, device
        self._headers = files.headers or {}
        self._open: tuple[str, Any] | None = None
        self._bucket = torch.empty(0, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """Close the file and free the bucket."""
        self._open, self._bucket = None, self._bucket[:0].clone()

    def chunks(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield at least elements [start, stop) of a flattened tensor, in the files' precision, as (offset, chunk).

        The range may exceed the tensor. A chunk is valid until the next one. If one rank reads for all, the call is
        collective and yields the whole tensor.
        """
        tensor = self._headers[name]
        rows, width = math.prod(tensor.shape[:1]), math.prod(tensor.shape[1:])
        if rows * width == 0:
            return
        first, last = (
            (max(0, start // width), min(rows, -(-stop // width))) if self._files.reader is None else (0, rows)
        )
        step = max(1, BUCKET_BYTES // (width * DTYPES[tensor.dtype].itemsize))
        for low in range(first, last, step):
            high = min(low + step, last)
            yield low * width, self._rows(name, low, high, (high - low) * width)

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Collective if one rank reads for all."""
        tensor = self._headers[name]
        result = torch.empty(math.prod(tensor.shape), dtype=DTYPES[tensor.dtype])
        for start, chunk in self.chunks(name, 0, len(result)):
            result[start : start + chunk.numel()].copy_(chunk)
        return result.view(tensor.shape)

    def _rows(self, name: str, low: int, high: int, numel: int) -> Tensor:
        if self._files.reader is None:
            return self.read(name, low, high)
        dtype = DTYPES[self._headers[name].dtype]
        size = numel * dtype.itemsize
        if len(self._bucket) <= size:
            self._bucket = torch.empty(size + 1, dtype=torch.uint8, device=self._device)
        # The last byte is 1 if the read succeeded. After a failure the other ranks raise, too, and do not wait forever.
        sent = self._bucket[: size + 1]
        error: Exception | None = None
        if self._files.reads:
            try:
                sent[:-1].copy_(self.read(name, low, high).view(torch.uint8))
            except Exception as caught:
                error = caught
            sent[-1] = error is None
        broadcast(sent, self._files.reader)
        if error is not None:
            raise error
        if not sent[-1]:
            raise ReaderFailed
        return sent[:-1].view(dtype)

    def read(self, name: str, low: int, high: int) -> Tensor:
        """Return rows [low, high) of a tensor from the file, flattened."""
        tensor = self._headers[name]
        with as_user_errors(self._files.source):
            if self._open is None or self._open[0] != tensor.file:
                self._open = tensor.file, safe_open(self._files.folder / tensor.file, framework="pt")
            part = self._open[1].get_slice(name)
            return (part[low:high] if tensor.shape else part[...]).reshape(-1)


def load(
    files: ModelFiles, hf_config: PretrainedConfig, load_from: Load, coordinator: Coordinator, device: torch.device
) -> PendingModel:
    """Build the model of `files`; `PendingModel.fill` then loads its weights. Collective.

    Raises:
        UserError: on every rank, if weights are missing or unreadable, or if only transformers can read the folder and
            a rank does not see it.
    """
    reader = ModelReader(files, coordinator, device)
    plain = files.headers is not None and not any(getattr(hf_config, name, None) for name in NEEDS_TRANSFORMERS)
    if plain:
        generator = torch.get_rng_state()
        headers, fused = fuse_experts(files.headers or {}, hf_config)
        found = on_every_rank(lambda: skeleton(load_from, headers), coordinator)
        if found is not None:
            model, names = found
            parts = {own: parts_of(fused, name, headers[name].shape) for own, name in names.items()}
            return PendingModel(model, parts, reader)
        torch.set_rng_state(generator)  # `skeleton` has drawn a new head, and `load_from` draws the same one again
    if files.reader is None:
        return PendingModel(on_every_rank(lambda: load_from(None), coordinator), {}, reader)
    if not plain:
        raise UserError(
            f"{files.source} is not a plain folder of safetensors (an adapter, quantized, or other file names), so "
            "every rank must read it: put the folder at this path on every node."
        )
    received: dict[str, Tensor] = {}

    def receive() -> None:
        with contextlib.suppress(ReaderFailed):
            received.update((name, reader.whole(name)) for name in files.headers or {})

    on_every_rank(receive, coordinator)
    reader.close()
    return PendingModel(on_every_rank(lambda: load_from(received), coordinator), {}, reader)
