"""Fingerprint of a model's files, which a checkpoint keeps. Imports no torch."""

from pathlib import Path

import xxhash

SAMPLE_BYTES = 1 << 20
SAMPLES = 16


def fingerprint(folder: Path) -> str:
    """A hash that tells whether a resume starts from the same model files: names, sizes and content.

    Of a file above 16 MiB, 16 evenly spaced blocks of 1 MiB are read: training changes every tensor, so a sample shows
    it.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(
        p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".jinja", ".model", ".txt")
    ):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= SAMPLES * SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for i in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def fingerprint_file(path: Path) -> str:
    """A hash of all that is in the file."""
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
