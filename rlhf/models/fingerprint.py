"""Computes the fingerprint of a model's files that a checkpoint records. Imports no torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
SAMPLE_BYTES = 1 << 20
SAMPLES = 16
TENSOR_SAMPLE_BYTES = 1 << 16


def fingerprint(folder: Path) -> str:
    """Return a hash of a model folder's file names, sizes and content, to check that a resume uses the same model.

    Of a file above 16 MiB, only 16 evenly spaced blocks of 1 MiB and the first 64 KiB of each tensor are hashed. Every
    tensor is sampled because training may change only some tensors. A trained tensor changes everywhere.
    """
    digest = xxhash.xxh3_128()
    # Read regular files only: a pipe would block forever.
    for path in sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= SAMPLES * SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for i in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
            for begin, length in _tensors(file, size) if path.suffix == ".safetensors" else ():
                file.seek(begin)
                digest.update(file.read(min(length, TENSOR_SAMPLE_BYTES)))
    return digest.hexdigest()


def code_fingerprint(folder: Path) -> str:
    """Return a hash of the folder's Python files, which `model.trust_remote_code` runs; empty without any."""
    files = sorted(path for path in folder.glob("*.py") if path.is_file())
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(f"{path.name}\0{fingerprint_file(path)}\0".encode())
    return digest.hexdigest() if files else ""


def _tensors(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Yield each tensor's offset and length in bytes; nothing for a damaged file, which fails when it loads."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length)) if length < size else {}
        found = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        yield from ((8 + length + begin, max(end - begin, 0)) for begin, end in found if begin >= 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return


def fingerprint_file(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
