"""manifest.json: the list of what was committed, and the proof that it is whole.

A directory without a valid one is not a checkpoint.
"""

import json
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from rlhf.checkpoint.commit.formats import FORMAT, OLDEST, is_read, migrated
from rlhf.checkpoint.commit.manifest_form import problems_of
from rlhf.config.migrations import migrated_name
from rlhf.storage.disk_errors import DamagedCheckpoint, OtherFormat
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.hashing import BLOCK
from rlhf.storage.layout import MANIFEST, step_of
from rlhf.storage.reading import CheckedFiles, read_regular

LARGEST_BYTES = 256 << 20
"""More than any manifest has: enough for the hashes of 30 TB."""
BLOCKS_AT_A_TIME = 64
"""Blocks that are read between two signs of progress."""
DOMAINS = "domains"
"""In a file's entry: the storage domains (see `rlhf.ranks.coordinator`) that have it, at the save.

Without it, each of them has.
"""


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint. `files` maps each path to its size and hashes; the manifest's own text carries a
    checksum of itself.

    Where nodes have disks of their own, the same manifest lies on each, and the entries say which files are not on all
    of them (`DOMAINS`).

    `threads` are those that each rank computed with on the CPU, on which bits depend.

    `numerics` is the numerics version (`rlhf.numerics`) of the release that saved it.

    `format` is the stored one; the fields are those of the present format whatever it is (see `formats`).

    `fingerprints` are of the files that settings name (`model.path` and so on), by the present names of the settings.
    `linked` maps each folder whose files this save did not write to the checkpoint that it shares them with. `metrics`
    are the figures of the step.

    `imported` says of a checkpoint that no run has saved where it came from: `layout` and `path`; empty of all others.
    Such a one holds what was there, and no configuration.
    """

    step: int
    world_size: int
    backend: str
    contents: list[str]
    roles: list[str]
    config_hash: str
    fingerprints: dict[str, str]
    created: str
    versions: dict[str, str]
    threads: list[int]
    numerics: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    linked: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def release(self) -> str | None:
        """The release of this trainer that saved it."""
        return self.versions.get("rlhf")

    @property
    def total_bytes(self) -> int:
        """Bytes that the save wrote, the manifest itself aside."""
        return sum(entry["size"] for entry in self.files.values()) - self.linked_bytes

    @property
    def linked_bytes(self) -> int:
        """Bytes of the files that it linked instead."""
        return sum(entry["size"] for folder in self.linked for entry in self.in_folder(folder).values())

    def in_folder(self, folder: str) -> dict[str, dict[str, Any]]:
        """The part of `files` that lies in `folder`."""
        return {name: entry for name, entry in self.files.items() if name.startswith(f"{folder}/")}

    def expected_at(self, root: Path) -> list[str]:
        """The files that must lie at `root`: all of them or, on a disk that a node has for itself, those of its storage
        domain.

        That is the domain of which most files are there. Files of others that are there as well count too.
        """
        domains = {domain for entry in self.files.values() for domain in entry.get(DOMAINS, ())}
        there = {name for name, entry in self.files.items() if DOMAINS not in entry or (root / name).is_file()}
        by_domain = [
            {name for name, entry in self.files.items() if domain in entry.get(DOMAINS, ())} for domain in domains
        ]
        own = max(by_domain, key=lambda names: len(names & there), default=set())
        return [name for name in self.files if name in there | own]


def describe(files: list[WrittenFile]) -> dict[str, dict[str, Any]]:
    """`Manifest.files` from what the writers returned."""
    return {f.path: {"size": f.size, "xxh3_128": f.xxh3_128} for f in sorted(files, key=lambda f: f.path)}


def _text(payload: dict[str, Any]) -> bytes:
    body = json.dumps(payload, indent=1, sort_keys=True)
    checksum = xxhash.xxh3_128(body.encode()).hexdigest()
    return (json.dumps({"payload": payload, "checksum": checksum}, indent=1, sort_keys=True) + "\n").encode()


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write and fsync `root/manifest.json`, the last file of a checkpoint."""
    write_file(root, MANIFEST, [_text(asdict(manifest))])


def manifest_bytes(root: Path) -> bytes:
    """The bytes of a checkpoint's manifest, not proven; raises DamagedCheckpoint when there are none to read."""
    path = root / MANIFEST
    try:
        return read_regular(path, LARGEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(f"{root} has no {MANIFEST}: it was never committed") from None


def read_manifest(root: Path) -> Manifest:
    """The manifest of a checkpoint; raises DamagedCheckpoint unless every byte of it is as written, and of the step
    that the directory's name says."""
    manifest = parse_manifest(manifest_bytes(root), root / MANIFEST)
    named = step_of(root.absolute())
    if named is not None and named != manifest.step:
        raise DamagedCheckpoint(f"{root / MANIFEST} is of step {manifest.step}, and its folder of another")
    return manifest


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """The manifest whose file `path` holds the bytes `raw`; raises DamagedCheckpoint unless every one of them is as
    written, and each field of its type (see `manifest_form`); OtherFormat where another version has saved it."""
    try:
        document = json.loads(raw)
        payload = document.get("payload") if isinstance(document, dict) else None
        if not isinstance(payload, dict):
            raise ValueError("it is no manifest of this trainer")
        # One text per content: comparing whole texts also catches a flip that JSON would forgive, such as one in white
        # space.
        if _text(payload) != raw:
            raise ValueError("its checksum does not match")
        if not is_read(found := payload.get("format")):
            raise OtherFormat(
                f"{path} has format {reprlib.repr(found)}, and this version of the trainer reads formats {OLDEST} to "
                f"{FORMAT}: use the version that saved it"
            )
        payload = migrated(payload)
        if payload.keys() != (names := {field.name for field in fields(Manifest)}):
            raise ValueError(f"fields are missing or unknown: {reprlib.repr(sorted(payload.keys() ^ names))}")
        if problem := next(problems_of(payload), None):
            raise ValueError(problem)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None
    release = payload["versions"].get("rlhf")
    # Promise 19.
    fingerprints = {migrated_name(name, release): digest for name, digest in payload["fingerprints"].items()}
    return Manifest(**payload | {"fingerprints": fingerprints})


def verify_files(root: Path, manifest: Manifest, names: list[str] | None = None) -> list[str]:
    """Compare files with the manifest (all, or `names`) by size and hashes; returns one line per damaged file, none
    when intact."""
    return damage_in(CheckedFiles(root, manifest.files), manifest.files if names is None else names)


def damage_in(files: CheckedFiles, names: Iterable[str], read: Callable[[int], None] = lambda count: None) -> list[str]:
    """The same for files wherever they lie; `read` is told of bytes as they have been read."""
    problems = []
    for name in names:
        try:
            files.check_entry(name)
            blocks = files.blocks(name)
            for first in range(0, len(blocks), BLOCKS_AT_A_TIME):
                files.prove(name, blocks[first : first + BLOCKS_AT_A_TIME])
                read(min(BLOCKS_AT_A_TIME * BLOCK, files.size(name) - first * BLOCK))
        except DamagedCheckpoint as problem:
            problems.append(str(problem))
    return problems


def verify(root: Path) -> Manifest:
    """Read the manifest and check every file against it that must lie here; raises DamagedCheckpoint that lists what is
    wrong."""
    manifest = read_manifest(root)
    if problems := verify_files(root, manifest, manifest.expected_at(root)):
        raise DamagedCheckpoint(f"{root} is damaged: " + "; ".join(problems))
    return manifest
