"""manifest.json: the list of what was committed and the proof that it is whole. A directory without a valid one is not a checkpoint."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from rlhf.checkpoint.errors import DamagedCheckpoint
from rlhf.checkpoint.files import WrittenFile, hash_file, write_file
from rlhf.checkpoint.layout import MANIFEST

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `files` maps each path to its size and hash; the manifest's own text carries a checksum of itself."""

    step: int
    world_size: int
    backend: str
    contents: list[str]
    roles: list[str]
    config_hash: str
    model_fingerprint: str
    created: str
    versions: dict[str, str]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(entry["size"] for entry in self.files.values())


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


def read_manifest(root: Path) -> Manifest:
    """The manifest of a checkpoint; raises DamagedCheckpoint unless every byte of it is as written."""
    path = root / MANIFEST
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DamagedCheckpoint(f"{root} has no {MANIFEST}: it was never committed") from None
    try:
        payload = json.loads(raw)["payload"]
        # One text per content: comparing whole texts also catches a flip that JSON would forgive, such as one in white space.
        if _text(payload) != raw:
            raise ValueError("its checksum does not match")
        if payload["format"] != FORMAT:
            raise ValueError(f"format {payload['format']} is not {FORMAT}")
        manifest = Manifest(**payload)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None
    for name in manifest.files:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise DamagedCheckpoint(f"{path} names {name!r}, which points outside the checkpoint")
    return manifest


def verify_files(root: Path, manifest: Manifest, names: list[str] | None = None) -> list[str]:
    """Compare files with the manifest (all, or `names`) by size and hash; returns one line per damaged file, none when intact."""
    problems = []
    inside = root.resolve()
    for name in manifest.files if names is None else names:
        entry, path = manifest.files[name], root / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif not path.resolve().is_relative_to(inside):
            problems.append(f"{name}: a link that points outside the checkpoint")
        elif path.stat().st_size != entry["size"]:
            problems.append(f"{name}: {path.stat().st_size} bytes instead of {entry['size']}")
        elif hash_file(path)[1] != entry["xxh3_128"]:
            problems.append(f"{name}: content differs from its hash")
    return problems


def verify(root: Path) -> Manifest:
    """Read the manifest and check every file against it; raises DamagedCheckpoint that lists what is wrong."""
    manifest = read_manifest(root)
    if problems := verify_files(root, manifest):
        raise DamagedCheckpoint(f"{root} is damaged: " + "; ".join(problems))
    return manifest


def share_of_files(manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """The files that `rank` verifies, so that all ranks together read each one once: largest first, dealt to the least loaded."""
    loads = [0] * world_size
    mine = []
    for name, entry in sorted(manifest.files.items(), key=lambda item: (-item[1]["size"], item[0])):
        owner = loads.index(min(loads))
        loads[owner] += entry["size"] + 1
        if owner == rank:
            mine.append(name)
    return mine
