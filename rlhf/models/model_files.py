"""Finds the ranks that see a model's files, and copies the small files to the other ranks."""

import json
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from rlhf.errors import UserError
from rlhf.models.fingerprint import code_fingerprint, fingerprint
from rlhf.models.folder_check import SINGLE, indexed_weights
from rlhf.models.loading import ModelSource, resolve_path
from rlhf.ranks import dims
from rlhf.ranks.collectives import broadcast
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.files import make_new_dir, write_small
from rlhf.storage.shards import DTYPES

log = logging.getLogger(__name__)
T = TypeVar("T")

SMALL_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the small files that the reader sends to all ranks."""
CODE_SUFFIX = ".py"
HEADERS = "headers"
SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class FileTensor:
    """File, type and shape of a tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelFiles:
    """Describes the files of a model, and which ranks read the weights."""

    source: ModelSource
    folder: Path  # the model's folder, or this rank's own folder with copies of the small files
    reader: int | None  # rank that reads the weights for all; None if each rank reads what it needs
    headers: Mapping[str, FileTensor] | None
    """Tensors of the safetensors files by name; None for another layout, which only transformers can read."""
    fingerprint: str
    code_fingerprint: str = ""
    """Hash of the Python files that the model's classes come from; empty without such files."""

    @property
    def reads(self) -> bool:
        return self.reader is None or self.reader == dims.everyone().rank


def find_files(
    source: ModelSource, loading: str, coordinator: Coordinator, device: torch.device, scratch: Path
) -> ModelFiles:
    """Find the ranks that see the folder of `source`; send its small files to the others. Collective.

    Args:
        loading: `model.loading`.
        scratch: folder below which a rank without the reader's files, or with different files, writes the small files.

    Raises:
        UserError: on every rank, if no rank sees or downloads the folder, or a file is unreadable; with
            `loading=shard`, if not all ranks see the same files.
    """
    folder, seen = _find_folder(source, loading, coordinator)
    reader = next(rank for rank, content in enumerate(seen) if content is not None)
    others = [rank for rank, content in enumerate(seen) if content != seen[reader]]
    if others:
        _check_same_files(source, loading, seen, reader, others, coordinator)
    shared = bool(others) or loading == "broadcast"
    small, fingerprints = _read_small(source, folder, shared, reader, coordinator)
    if shared:
        small = _send(small, reader, coordinator, device)
    headers = _decoded(small.pop(HEADERS))
    copies = coordinator.rank in others
    if copies:
        folder = scratch / source.setting
    on_every_rank(lambda: _write(small, folder) if copies else None, coordinator)
    return ModelFiles(source, folder, reader if shared else None, headers, *fingerprints)


def _find_folder(source: ModelSource, loading: str, coordinator: Coordinator) -> tuple[Path, list[str | None]]:
    """Return the model's folder, downloaded for a Hub name, and `_quick_hash` by rank (None without the folder)."""
    folder = Path(source.path).expanduser()
    seen = _hash_by_rank(source, folder, _has_model, coordinator)
    if any(seen):
        return folder, seen
    folder = coordinator.on_leader(partial(resolve_path, source))
    if loading == "shard":  # each node downloads to its own disk
        folders = coordinator.everywhere(lambda: folder if folder.is_dir() else resolve_path(source))
        folder = folders[coordinator.rank]
    return folder, _hash_by_rank(source, folder, Path.is_dir, coordinator)


def _check_same_files(
    source: ModelSource,
    loading: str,
    seen: Sequence[str | None],
    reader: int,
    others: Sequence[int],
    coordinator: Coordinator,
) -> None:
    """Report the ranks `others`, which lack the files of rank `reader` or see different files.

    With `loading=shard`, raise UserError. Otherwise log a warning about ranks that see different files.
    """
    if loading == "shard":
        host = coordinator.all_gather(socket.gethostname())[others[0]]
        what = "does not see" if seen[others[0]] is None else f"sees different files than rank {reader} in"
        raise UserError(
            f"model.loading=shard: rank {others[0]} (on {host}) {what} {source}. Put the same folder at that path on "
            "every node, or set model.loading=auto."
        )
    differing = [rank for rank in others if seen[rank] is not None]
    if differing and coordinator.is_leader:
        log.warning(
            "Ranks %s see different files in %s than rank %d; all ranks use the files of rank %d.",
            differing,
            source,
            reader,
            reader,
        )


def _read_small(
    source: ModelSource, folder: Path, shared: bool, reader: int, coordinator: Coordinator
) -> tuple[dict[str, bytes], tuple[str, str]]:
    """Return the small files to send, with the tensor headers as a further file, and the reader's two fingerprints.

    Collective.
    """
    is_reader = coordinator.rank == reader

    def look() -> tuple[dict[str, bytes], tuple[str, str]]:
        with as_user_errors(source):
            small = _small_files(folder, source.trust_remote_code) if shared and is_reader else {}
            if is_reader or not shared:
                small[HEADERS] = _encoded(read_headers(folder, str(source)))
            if not is_reader:
                return small, ("", "")
            return small, (fingerprint(folder), code_fingerprint(folder) if source.trust_remote_code else "")

    small, own_fingerprints = on_every_rank(look, coordinator)
    return small, coordinator.all_gather(own_fingerprints)[reader]


def _encoded(headers: Mapping[str, FileTensor] | None) -> bytes:
    entries = None if headers is None else {name: (t.file, t.dtype, t.shape) for name, t in headers.items()}
    return json.dumps(entries).encode()


def _decoded(headers: bytes) -> dict[str, FileTensor] | None:
    entries = json.loads(headers)
    if entries is None:
        return None
    return {name: FileTensor(file, dtype, tuple(shape)) for name, (file, dtype, shape) in entries.items()}


def read_headers(folder: Path, name: str = "model") -> dict[str, FileTensor] | None:
    """Return the tensors of `folder` by name; None unless it has a model in safetensors with the usual file names.

    Also return None for an adapter, and if a tensor has a type that is not in `DTYPES`.

    Raises:
        UserError: the index of the weights is damaged; the message begins with `name`, the model's setting.
    """
    names = [SINGLE] if (folder / SINGLE).is_file() else indexed_weights(name, folder)
    if names is None or (folder / "adapter_config.json").is_file():
        return None
    tensors = {}
    for weights in names:
        with safe_open(folder / weights, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                tensors[key] = FileTensor(weights, part.get_dtype(), tuple(part.get_shape()))
    return tensors if all(tensor.dtype in DTYPES for tensor in tensors.values()) else None


@contextmanager
def as_user_errors(source: ModelSource) -> Iterator[None]:
    """Turn errors of reading the model's files into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{source} can't be loaded from safetensors: {error}. Restore its files.") from error


def on_every_rank(action: Callable[[], T], coordinator: Coordinator) -> T:
    """Return this rank's result of `action`; raise on every rank if any rank raises.

    Unlike `Coordinator.everywhere`, this sends no results between ranks.
    """
    results: list[T] = []
    coordinator.everywhere(lambda: results.append(action()))
    return results[0]


def _has_model(folder: Path) -> bool:
    """Return whether `folder` has a model, unlike the empty mount point of an unmounted disk."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _hash_by_rank(
    source: ModelSource, folder: Path, is_present: Callable[[Path], bool], coordinator: Coordinator
) -> list[str | None]:
    def look() -> str | None:
        with as_user_errors(source):
            return _quick_hash(folder) if is_present(folder) else None

    return coordinator.everywhere(look)


def _quick_hash(folder: Path) -> str:
    """Return a hash of file names and sizes, the content of small files, and a sample of each weights file."""
    digest = xxhash.xxh3_128()
    # Read regular files only: a pipe would block forever.
    for path in sorted(p for p in folder.iterdir() if p.suffix in (*SMALL_SUFFIXES, ".safetensors") and p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                file.seek(max(0, size - SAMPLE_BYTES) // 2)
                digest.update(file.read(SAMPLE_BYTES))
            else:
                digest.update(file.read())
    return digest.hexdigest()


def _small_files(folder: Path, code: bool) -> dict[str, bytes]:
    suffixes = (*SMALL_SUFFIXES, CODE_SUFFIX) if code else SMALL_SUFFIXES
    files = sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.is_file())
    return {path.name: path.read_bytes() for path in files}


def _send(contents: dict[str, bytes], reader: int, coordinator: Coordinator, device: torch.device) -> dict[str, bytes]:
    """Broadcast the reader's `contents` and return them on every rank."""
    sizes = coordinator.all_gather({name: len(content) for name, content in contents.items()})[reader]
    sent = {}
    for name, size in sizes.items():
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        if coordinator.rank == reader and size:
            buffer.copy_(torch.frombuffer(bytearray(contents[name]), dtype=torch.uint8))
        broadcast(buffer, reader)
        sent[name] = buffer.cpu().numpy().tobytes()
    return sent


def _write(contents: Mapping[str, bytes], folder: Path) -> None:
    make_new_dir(folder)
    for name, content in contents.items():
        write_small(folder / name, content)
