"""Verb `inspect`: one checkpoint's roles, tensors and driver state. Loads no torch."""

import argparse
import reprlib
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf.checkpoint.commit.manifest import Manifest, read_manifest, verify_files
from rlhf.checkpoint.driver_state import parse_driver_state
from rlhf.checkpoint.verbs.places import add_path, checkpoints_at, looked_at
from rlhf.checkpoint.verbs.shown import printable, size_text, sizes_of
from rlhf.errors import EXIT_CRASHED, EXIT_DONE
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import DRIVER_STATE, INDEX
from rlhf.storage.reading import CheckedFiles

NAME = "inspect"
HELP = "what one checkpoint holds: roles, tensors, driver state"

add_arguments = add_path


def run(arguments: argparse.Namespace, console: Console) -> int:
    """The newest checkpoint of a run directory, or the one given, in detail."""
    checkpoint = checkpoints_at(arguments.path)[0]
    text = looked_at(checkpoint, lambda: list(_details(checkpoint)))
    if isinstance(text, str):
        console.print(printable(text))
        return EXIT_CRASHED
    for line in text:
        console.print(printable(line))
    return EXIT_DONE


def _details(checkpoint: Path) -> list[str]:
    """What `inspect` shows; raises DamagedCheckpoint unless all that it is read from is as committed."""
    from rlhf.storage.shard_index import ShardIndex  # with NumPy, which only this needs

    manifest = read_manifest(checkpoint)
    files = CheckedFiles(checkpoint, manifest.files)
    here = manifest.expected_at(checkpoint)
    if problems := verify_files(checkpoint, manifest, [name for name in here if name.endswith((".json", INDEX))]):
        raise DamagedCheckpoint(f"{checkpoint} is damaged: " + "; ".join(problems))
    facts = {
        "checkpoint": str(checkpoint),
        "step": manifest.step,
        "created": manifest.created,
        "size": f"{sizes_of(manifest)} in {len(manifest.files)} files",
        "ranks, backend": f"{manifest.world_size}, {manifest.backend}",
        "contents": ", ".join(manifest.contents),
        "linked": ", ".join(f"{folder} from {source}" for folder, source in manifest.linked.items()) or "nothing",
        "versions": ", ".join(f"{k} {v}" for k, v in sorted(manifest.versions.items())),
    }
    lines = [f"{name:16} {value}" for name, value in facts.items()]
    try:
        lines.append(f"driver state {_bounded(parse_driver_state(files.content(DRIVER_STATE), DRIVER_STATE))}")
        for folder, size in _folders(manifest).items():
            if f"{folder}/{INDEX}" not in here:
                lines.append(f"{folder}: {size_text(size)}")
                continue
            index = ShardIndex(files, folder)
            counts = index.counts()
            lines.append(f"{folder}: {size_text(size)}, {len(counts)} tensors")
            for name, (dtype, shape) in index.tensors.items():
                lines.append(f"  {name}  {dtype} {list(shape)}  in {counts[name]} shard(s)")
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {error}") from None
    return lines


def _bounded(state: dict[str, Any]) -> str:
    shown = reprlib.Repr()
    shown.maxlevel, shown.maxdict, shown.maxlist, shown.maxstring, shown.maxother = 8, 100, 100, 200, 200
    return shown.repr(state)


def _folders(manifest: Manifest) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, entry in manifest.files.items():
        folder = str(Path(name).parent)
        sizes[folder] = sizes.get(folder, 0) + entry["size"]
    return dict(sorted(sizes.items()))
