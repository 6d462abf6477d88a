"""Locates whole tensors in plain safetensors files, such as a Hugging Face folder's. Imports no torch."""

import math
from collections.abc import Iterable, Mapping

from rlhf.storage.boxes import Box, overlaps, whole_box
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.safetensors_header import ITEM_BYTES, read_safetensors_header
from rlhf.storage.shard_index import Piece


class WholeTensors:
    """Locates the tensors in plain safetensors files of a folder, each tensor whole in one file."""

    def __init__(self, files: CheckedFiles, folder: str, file_names: Iterable[str]) -> None:
        self.path = folder
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._positions: dict[str, tuple[str, int]] = {}
        for file_name in file_names:
            header, length = read_safetensors_header(files, f"{folder}/{file_name}")
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                if end - begin != ITEM_BYTES.get(entry["dtype"], 0) * math.prod(entry["shape"]):
                    raise DamagedCheckpoint(
                        f"{folder}/{file_name}: {name} has the wrong number of bytes, {end - begin}"
                    )
                self.tensors[name] = entry["dtype"], tuple(entry["shape"])
                self._positions[name] = file_name, length + begin

    def find(self, wanted: Mapping[str, Box], rank: int, world_size: int) -> list[Piece]:
        return [
            Piece(name, common, *self._positions[name], whole)
            for name, box in wanted.items()
            for whole in [whole_box(self.tensors[name][1])]
            for common in overlaps(whole, box, self.tensors[name][1])
        ]
