"""Stores tokenized prompts in Arrow's streaming format (`datasets.Dataset.from_file` reads it), mapped into memory.

Columns: `index` (the row's position in all sources), `row` (JSON: messages, data source, reference answer, extra info,
and columns for rewards, if any), `token_ids`, `check` (the xxh3-64 of these three columns, verified at each read) and
`prompt_hash` (the xxh3-64 of the tokens). The file contains no code, and a rank loads only the rows in use.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rlhf.data.items import Prompt, Row
from rlhf.data.prompts import PromptsHash, token_hash
from rlhf.data.tokens import BATCH, Lengths, in_batches
from rlhf.errors import UserError
from rlhf.storage.files import remove_file, write_file, write_json

ARROW, ABOUT = "prompts.arrow", "about.json"
PLAIN = (str, int, float, bool, type(None))


class NotPlain(Exception):
    """A row has a value that JSON cannot represent, such as a date, so reading would not return the same value."""


class DamagedPrompts(Exception):
    """A file of prompts differs from the file that was written."""


def write_prompts(folder: Path, prompts: Iterable[tuple[Row, list[int]]], lengths: Lengths) -> bool:
    """Write `prompts` and their metadata to `folder`, and return True.

    If the file cannot store the prompts, write only the reason and return False.

    Args:
        prompts: from `LengthLimit.tokenized`, which fills `lengths`.
    """
    digest = PromptsHash()
    try:
        written = write_file(folder, ARROW, _stream(prompts, digest))
    except NotPlain as error:
        remove_file(folder / ARROW)
        _write_about(folder, {"not_plain": str(error)})
        return False
    about = {
        "rows": digest.rows,
        "size": written.size,
        "fingerprint": digest.of_rows(),
        "tokens_fingerprint": digest.of_tokens(),
        "lengths": asdict(lengths),
    }
    _write_about(folder, about)
    return True


def _write_about(folder: Path, about: dict[str, Any]) -> None:
    write_json(folder, ABOUT, {"about": about, "xxh3_128": _hash_of(about)})


def _read_about(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / ABOUT).read_bytes())
    if document["xxh3_128"] != _hash_of(document["about"]):
        raise DamagedPrompts(f"{folder / ABOUT} differs from its hash")
    return document["about"]


def _hash_of(about: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(about, sort_keys=True).encode())


class _Sink:
    """A file object for Arrow that buffers bytes until `pop`."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, part: Any) -> int:
        self._parts.append(bytes(part))
        return len(self._parts[-1])

    def flush(self) -> None:
        pass

    def pop(self) -> bytes:
        content = b"".join(self._parts)
        self._parts.clear()
        return content


def _schema() -> Any:
    import pyarrow as pa

    fields = [("index", pa.int64()), ("row", pa.large_binary()), ("token_ids", pa.list_(pa.int32()))]
    return pa.schema([*fields, ("check", pa.uint64()), ("prompt_hash", pa.uint64())])


def _stream(prompts: Iterable[tuple[Row, list[int]]], digest: PromptsHash) -> Iterator[bytes]:
    import pyarrow as pa

    sink, schema = _Sink(), _schema()
    with pa.ipc.new_stream(sink, schema) as writer:
        for part in in_batches(prompts):
            for row, _ in part:
                _check_plain(row)
            indices = [row.index for row, _ in part]
            token_ids = [np.asarray(ids, "<i4") for _, ids in part]
            texts = [digest.add(row, ids).encode() for (row, _), ids in zip(part, token_ids, strict=True)]
            checks = [_check(*of_row) for of_row in zip(indices, texts, token_ids, strict=True)]
            columns = [indices, texts, token_ids, checks, list(map(token_hash, token_ids))]
            writer.write_batch(
                pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema)
            )
            yield sink.pop()
    yield sink.pop()


def _check(index: int, row: bytes, token_ids: np.ndarray) -> int:
    digest = xxhash.xxh3_64(index.to_bytes(8, "little"))
    digest.update(row)
    digest.update(token_ids.tobytes())
    return digest.intdigest()


def _check_plain(row: Row) -> None:
    for value in (row.ground_truth, row.extra_info, row.columns):
        if (kind := _not_plain(value)) is not None:
            raise NotPlain(f"{row.where} has a value of type {kind.__name__}, which JSON cannot represent")


def _not_plain(value: Any) -> type | None:
    if type(value) in PLAIN:
        return None
    if type(value) is list:
        return next((kind for v in value if (kind := _not_plain(v)) is not None), None)
    if type(value) is dict and all(type(key) is str for key in value):
        return next((kind for v in value.values() if (kind := _not_plain(v)) is not None), None)
    return type(value)


class MappedPrompts:
    """The prompts of a folder that `write_prompts` wrote.

    Raises:
        FileNotFoundError: the folder has no prompts.
        DamagedPrompts: a file is incomplete or differs from its hash.
        NotPlain: `write_prompts` could not store the prompts.
    """

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        self._path = folder / ARROW
        try:
            about = _read_about(folder)
            if "not_plain" in about:
                raise NotPlain(about["not_plain"])
            self.fingerprint, self.tokens_fingerprint = about["fingerprint"], about["tokens_fingerprint"]
            self.lengths, self._rows = Lengths(**about["lengths"]), about["rows"]
            if (size := self._path.stat().st_size) != about["size"]:
                raise DamagedPrompts(f"{self._path} has {size} bytes instead of {about['size']}")
            # Zero-copy: reads only the headers of the batches.
            reader = pa.ipc.open_stream(pa.memory_map(str(self._path)))
            if not reader.schema.equals(_schema()):
                raise DamagedPrompts(f"{self._path} does not have the expected columns")
            self._batches = list(reader)
        except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:  # Arrow's own errors have no errno
                raise
            raise DamagedPrompts(f"{folder} cannot be read: {error}") from error
        if [batch.num_rows for batch in self._batches[:-1]] != [BATCH] * (len(self._batches) - 1) or (
            sum(batch.num_rows for batch in self._batches) != self._rows
        ):
            raise DamagedPrompts(f"{self._path} does not have {self._rows} rows")

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, i: int) -> Prompt:
        columns, j = self._batches[i // BATCH].columns, i % BATCH
        try:
            index = int(np.frombuffer(columns[0].buffers()[1], "<i8")[j])
            row = _value(columns[1].buffers(), j, "<i8", "u1").tobytes()
            token_ids = _value([*columns[2].buffers()[:2], columns[2].values.buffers()[1]], j, "<i4", "<i4")
            intact = _check(index, row, token_ids) == int(np.frombuffer(columns[3].buffers()[1], "<u8")[j])
        except (IndexError, ValueError, OverflowError):
            intact = False
        if not intact:
            raise UserError(
                f"{self._path}: prompt {i} is damaged on the disk. Delete the folder {self._path.parent}, and run the "
                "same command again: it tokenizes the data files again."
            )
        messages, data_source, ground_truth, extra_info, *columns = json.loads(row)
        return Prompt(index, messages, token_ids.tolist(), data_source, ground_truth, extra_info, *columns)

    def prompt_hashes(self) -> np.ndarray:
        parts = [np.frombuffer(batch.columns[4].buffers()[1], "<u8")[: batch.num_rows] for batch in self._batches]
        return np.concatenate(parts) if parts else np.empty(0, "<u8")


def _value(buffers: list[Any], j: int, offset_type: str, value_type: str) -> np.ndarray:
    """Return entry `j` of a column of texts or lists.

    Unlike Arrow, NumPy does not read beyond the buffer if the offsets are damaged.
    """
    _, offsets, values = buffers
    start, end = map(int, np.frombuffer(offsets, offset_type)[j : j + 2])
    found = np.frombuffer(values, value_type)[start:end] if values is not None else np.empty(0, value_type)
    if start < 0 or len(found) != end - start:
        raise IndexError(j)
    return found
