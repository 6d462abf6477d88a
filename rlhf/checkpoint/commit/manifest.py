"""Reads and writes manifest.json: the files of a checkpoint and their hashes.

Without a valid manifest, a directory is not a checkpoint.
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
"""Largest size of a manifest in bytes: enough for the hashes of a checkpoint of 30 TB."""
BLOCKS_AT_A_TIME = 64
"""Blocks verified between two progress reports."""
DOMAINS = "domains"
"""Key of a file's entry: the storage domains (`rlhf.ranks.coordinator`) that saved the file; by default all."""


@dataclass(frozen=True)
class Manifest:
    """Lists a checkpoint's contents. `files` maps each path to its size and hashes.

    If nodes have their own disks, each disk has the same manifest, and `DOMAINS` of a file lists the domains that have
    the file. `threads` are the CPU threads of each rank; the bits of results depend on them. `numerics` is the numerics
    version (`rlhf.numerics`) of the release that saved the checkpoint. `format` is the stored format, but the fields
    are always those of the newest format (see `formats`). `fingerprints` map each setting that names files (such as
    `model.path`), by its name in this release, to a hash of the files. `linked` maps each folder of hard links to the
    checkpoint that it shares files with. `metrics` are the metrics of the step. `imported` is the source (`layout` and
    `path`) of an imported checkpoint, which has no configuration; else `imported` is empty.
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
        return self.versions.get("rlhf")

    @property
    def total_bytes(self) -> int:
        """Bytes that the save wrote, without the manifest."""
        return sum(entry["size"] for entry in self.files.values()) - self.linked_bytes

    @property
    def linked_bytes(self) -> int:
        """Bytes of the hard-linked files."""
        return sum(entry["size"] for folder in self.linked for entry in self.in_folder(folder).values())

    def in_folder(self, folder: str) -> dict[str, dict[str, Any]]:
        return {name: entry for name, entry in self.files.items() if name.startswith(f"{folder}/")}

    def expected_at(self, root: Path) -> list[str]:
        """Return the files that must be at `root`: all files if all ranks share one disk. Otherwise, the files of the
        disk's storage domain (the domain with the most files here), and other domains' files that exist here."""
        domains = {domain for entry in self.files.values() for domain in entry.get(DOMAINS, ())}
        there = {name for name, entry in self.files.items() if DOMAINS not in entry or (root / name).is_file()}
        by_domain = [
            {name for name, entry in self.files.items() if domain in entry.get(DOMAINS, ())} for domain in domains
        ]
        own = max(by_domain, key=lambda names: len(names & there), default=set())
        return [name for name in self.files if name in there | own]


def describe(files: list[WrittenFile]) -> dict[str, dict[str, Any]]:
    """Return the entries of written `files` for `Manifest.files`."""
    return {f.path: {"size": f.size, "xxh3_128": f.xxh3_128} for f in sorted(files, key=lambda f: f.path)}


def _text(payload: dict[str, Any]) -> bytes:
    body = json.dumps(payload, indent=1, sort_keys=True)
    checksum = xxhash.xxh3_128(body.encode()).hexdigest()
    return (json.dumps({"payload": payload, "checksum": checksum}, indent=1, sort_keys=True) + "\n").encode()


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write and fsync `root/manifest.json`, the last file of a checkpoint."""
    write_file(root, MANIFEST, [_text(asdict(manifest))])


def manifest_bytes(root: Path) -> bytes:
    """Return the manifest's bytes, not verified; raise DamagedCheckpoint if it is missing or a symbolic link."""
    path = root / MANIFEST
    if path.is_symlink():
        raise DamagedCheckpoint(f"{path} is a symbolic link, but a save writes files: copy the checkpoint again")
    try:
        return read_regular(path, LARGEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(f"{root} has no {MANIFEST}: it was never committed") from None


def read_manifest(root: Path) -> Manifest:
    """Return a checkpoint's manifest; raise like `parse_manifest`, and if `root` is named after another step."""
    manifest = parse_manifest(manifest_bytes(root), root / MANIFEST)
    named = step_of(root.absolute())
    if named is not None and named != manifest.step:
        raise DamagedCheckpoint(f"{root / MANIFEST} is of step {manifest.step}, but its folder's name has another step")
    return manifest


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """Parse a manifest. Raises DamagedCheckpoint unless the checksum matches and each field has its type (see
    `manifest_form`); raises OtherFormat for a format that this version does not read."""
    try:
        document = json.loads(raw)
        payload = document.get("payload") if isinstance(document, dict) else None
        if not isinstance(payload, dict):
            raise ValueError("it is not a manifest of this trainer")
        # `_text` writes a payload in only one way. So this comparison also finds a bit flip in white space, which JSON
        # ignores.
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


def damage_in(files: CheckedFiles, names: Iterable[str], read: Callable[[int], None] = lambda count: None) -> list[str]:
    """Verify the files `names` and return one line per damaged file; call `read` with the number of bytes read."""
    problems = []
    for name in names:
        try:
            files.check_entry(name)
            blocks = files.blocks(name)
            for first in range(0, len(blocks), BLOCKS_AT_A_TIME):
                files.verify_blocks(name, blocks[first : first + BLOCKS_AT_A_TIME])
                read(min(BLOCKS_AT_A_TIME * BLOCK, files.size(name) - first * BLOCK))
        except DamagedCheckpoint as problem:
            problems.append(str(problem))
    return problems
