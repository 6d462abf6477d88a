"""Writes a component of a native checkpoint (weights, moments) as one rank's shards, from any source."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf.models.hf.hf_folder import prefetch_next, ranges_of
from rlhf.models.hf.hf_plan import Progress
from rlhf.models.hf.source import ReadableTensor
from rlhf.storage.boxes import whole_box
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.index_rows import rows_of
from rlhf.storage.layout import INDEX, rank_file
from rlhf.storage.safetensors_header import make_safetensors_header
from rlhf.storage.shard_index import FileShards, hash_of_table, merge_shares
from rlhf.storage.shards import DTYPE_NAMES, as_bytes


def write_component(
    root: Path, folder: str, tensors: Mapping[str, ReadableTensor], progress: Progress
) -> list[WrittenFile]:
    """Write `tensors` to `root/folder`, in one file with its index. Each tensor gets the dtype in its `info`.

    Any number of ranks can load this one file, because each rank reads only its parts: see `rlhf.storage.shards`.
    """
    infos = {name: tensor.info for name, tensor in tensors.items()}
    table = {name: (DTYPE_NAMES[info.dtype], info.shape) for name, info in infos.items()}
    number = {name: i for i, name in enumerate(sorted(table))}
    # AdamW's step counts, of one element each, come first, as in `rlhf.storage.shards.lay_out`.
    flat = {name: infos[name] for name in sorted(infos, key=lambda name: infos[name].numel > 1) if infos[name].numel}
    header = make_safetensors_header({name: (table[name][0], (info.numel,)) for name, info in flat.items()})

    def content() -> Iterator[bytes | memoryview]:
        yield header
        chunks = (tensors[name].read(start, stop).to(flat[name].dtype) for name, start, stop in ranges_of(flat))
        for chunk in prefetch_next(chunks):
            yield as_bytes(chunk)
            progress(chunk.nbytes)

    rows = rows_of((number[name], whole_box(info.shape)) for name, info in flat.items())
    index = merge_shares(table, [FileShards(rank_file(0), len(header), rows, hash_of_table(table))])
    return [write_file(root, f"{folder}/{rank_file(0)}", content()), write_file(root, f"{folder}/{INDEX}", [index])]
