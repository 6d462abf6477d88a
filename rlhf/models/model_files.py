"""Files of a model: which ranks see them, and copies of the small ones for the ranks that do not."""

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
from rlhf.models.fingerprint import fingerprint
from rlhf.models.loading import ModelSource, resolve_path
from rlhf.ranks import dims
from rlhf.ranks.collectives import broadcast
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.files import make_new_dir, write_small
from rlhf.storage.shards import DTYPES

log = logging.getLogger(__name__)
T = TypeVar("T")

SMALL = (".json", ".jinja", ".model", ".txt")
"""Files that reach a node which does not see the folder."""
CODE = ".py"
HEADERS = "headers"
SEEN_BYTES = 1 << 16


@dataclass(frozen=True)
class FileTensor:
    """The place of a tensor in the files."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelFiles:
    """A model's files as this rank gets at them."""

    source: ModelSource
    folder: Path
    """The folder itself, or one of this rank's own with copies of its small files."""
    reader: int | None
    """The rank that reads the weights for all; None: each rank reads what it needs."""
    headers: Mapping[str, FileTensor] | None
    """The tensors of the safetensors files by name; None where the folder is laid out otherwise and only the library
    can read it."""
    fingerprint: str

    @property
    def reads(self) -> bool:
        """Whether this rank reads weights from `folder`."""
        return self.reader is None or self.reader == dims.everyone().rank

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell what reading `folder` raises as the user's mistake that it is."""
        with _telling(self.source):
            yield


def find_files(
    source: ModelSource, loading: str, coordinator: Coordinator, device: torch.device, scratch: Path
) -> ModelFiles:
    """See who sees what `source` names, and give the others its small files, below `scratch`. Collective.

    Args:
        loading: `model.loading`.

    Raises:
        UserError: no rank sees it, or, with `loading=shard`, one does not. The same on every rank.
    """
    folder, seen = _look_for(source, loading, coordinator)
    reader = next(rank for rank, content in enumerate(seen) if content is not None)
    others = [rank for rank, content in enumerate(seen) if content != seen[reader]]
    if others:
        _judge(source, loading, seen, reader, others, coordinator)
    shared = bool(others) or loading == "broadcast"
    small, mark = _read_small(source, folder, shared, reader, coordinator)
    if shared:
        small = _send(small, reader, coordinator, device)
    headers = _decoded(small.pop(HEADERS))
    copies = coordinator.rank in others
    if copies:
        folder = scratch / source.setting
    on_every_rank(lambda: _write(small, folder) if copies else None, coordinator)
    return ModelFiles(source, folder, reader if shared else None, headers, mark)


def _look_for(source: ModelSource, loading: str, coordinator: Coordinator) -> tuple[Path, list[str | None]]:
    """The folder, downloaded where `source` is a Hub name, and what each rank sees in it (`_seen`; None: no model)."""
    folder = Path(source.path).expanduser()
    seen = _seen_by_rank(source, folder, _has_model, coordinator)
    if any(seen):
        return folder, seen
    folder = coordinator.on_leader(partial(resolve_path, source))
    if loading == "shard":  # each node downloads onto a disk of its own
        folders = coordinator.everywhere(lambda: folder if folder.is_dir() else resolve_path(source))
        folder = folders[coordinator.rank]
    return folder, _seen_by_rank(source, folder, Path.is_dir, coordinator)


def _judge(
    source: ModelSource,
    loading: str,
    seen: Sequence[str | None],
    reader: int,
    others: Sequence[int],
    coordinator: Coordinator,
) -> None:
    """Refuse `others`, which do not see what `reader` sees, under `loading=shard`; else say which of them see other
    files."""
    if loading == "shard":
        host = coordinator.gather(socket.gethostname())[others[0]]
        what = "does not see" if seen[others[0]] is None else f"sees other files than rank {reader} in"
        raise UserError(
            f"model.loading=shard: rank {others[0]} (on {host}) {what} {source}. Put the same folder at that path on "
            "every node, or set model.loading=auto."
        )
    differing = [rank for rank in others if seen[rank] is not None]
    if differing and coordinator.is_leader:
        log.warning(
            "Ranks %s see other files in %s than rank %d, and take rank %d's.", differing, source, reader, reader
        )


def _read_small(
    source: ModelSource, folder: Path, shared: bool, reader: int, coordinator: Coordinator
) -> tuple[dict[str, bytes], str]:
    """The small files that are to be sent, with the headers as one more; and the fingerprint that `reader` finds.
    Collective."""
    is_reader = coordinator.rank == reader

    def look() -> tuple[dict[str, bytes], str]:
        with _telling(source):
            small = _small_files(folder, source.trust_remote_code) if shared and is_reader else {}
            if is_reader or not shared:
                small[HEADERS] = _encoded(read_headers(folder))
            return small, fingerprint(folder) if is_reader else ""

    small, own_mark = on_every_rank(look, coordinator)
    return small, coordinator.gather(own_mark)[reader]


def _encoded(headers: Mapping[str, FileTensor] | None) -> bytes:
    entries = None if headers is None else {name: (t.file, t.dtype, t.shape) for name, t in headers.items()}
    return json.dumps(entries).encode()


def _decoded(headers: bytes) -> dict[str, FileTensor] | None:
    entries = json.loads(headers)
    if entries is None:
        return None
    return {name: FileTensor(file, dtype, tuple(shape)) for name, (file, dtype, shape) in entries.items()}


def read_headers(folder: Path) -> dict[str, FileTensor] | None:
    """The tensors of `folder` by name; None where it is not one model in safetensors files that are named as usual."""
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file():
        index = folder / "model.safetensors.index.json"
        if not index.is_file():
            return None
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if (folder / "adapter_config.json").is_file() or any(Path(name).name != name for name in names):
        return None
    tensors = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                tensors[key] = FileTensor(name, part.get_dtype(), tuple(part.get_shape()))
    return tensors if all(tensor.dtype in DTYPES for tensor in tensors.values()) else None


@contextmanager
def _telling(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{source} can't be loaded from safetensors: {error}") from error


def on_every_rank(action: Callable[[], T], coordinator: Coordinator) -> T:
    """The result of `action` on this rank; when it raises anywhere, every rank raises. Unlike `Coordinator.everywhere`
    it sends none."""
    results: list[T] = []
    coordinator.everywhere(lambda: results.append(action()))
    return results[0]


def _has_model(folder: Path) -> bool:
    """Not the empty folder of a disk that is not mounted, nor a copy without the weights."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _seen_by_rank(
    source: ModelSource, folder: Path, sees: Callable[[Path], bool], coordinator: Coordinator
) -> list[str | None]:
    def look() -> str | None:
        with _telling(source):
            return _seen(folder) if sees(folder) else None

    return coordinator.everywhere(look)


def _seen(folder: Path) -> str:
    """A hash of the names and sizes of the files, the small ones' content and a sample of the weights."""
    digest = xxhash.xxh3_128()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (*SMALL, ".safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                file.seek(max(0, size - SEEN_BYTES) // 2)
                digest.update(file.read(SEEN_BYTES))
            else:
                digest.update(file.read())
    return digest.hexdigest()


def _small_files(folder: Path, code: bool) -> dict[str, bytes]:
    suffixes = (*SMALL, CODE) if code else SMALL
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in suffixes}


def _send(contents: dict[str, bytes], reader: int, coordinator: Coordinator, device: torch.device) -> dict[str, bytes]:
    """The reader's `contents` on every rank."""
    sizes = coordinator.gather({name: len(content) for name, content in contents.items()})[reader]
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
