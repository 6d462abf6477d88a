"""Verb `inspect`: shows one checkpoint's roles, tensors and driver state. Loads no torch."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf.checkpoint.commit.manifest import Manifest, damage_in
from rlhf.checkpoint.state.driver_state import parse_driver_state
from rlhf.checkpoint.verbs.addresses import add_address, find_runs
from rlhf.checkpoint.verbs.runs import FoundCheckpoint, read_checkpoint
from rlhf.checkpoint.verbs.shown import facts_of, show_checkpoints, size_text, sizes_of
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import DRIVER_STATE, INDEX

HELP = "show one checkpoint (of a run: the newest): roles, tensors, driver state"

MOST, LONGEST, DEEPEST = 100, 200, 8
"""Limits for a driver state of any size: values shown, characters of each value, and levels of nesting."""

DOCUMENT = (
    "`checkpoints`: `path`, `problem` (null or a line); if readable, `step`, `created`, `size` (text), `bytes`, "
    "`linked_bytes`, `files`, `ranks`, `backend`, `contents`, `metrics`, `linked`, `versions`, `numerics`, `format`, "
    "`imported`, `driver_state`, `folders`: `folder`, `bytes`, `tensors` (null, or `name`, `dtype`, `shape`, `shards`)"
)
add_arguments = partial(add_address, document=DOCUMENT)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Show the newest checkpoint of each run, or the given checkpoint, in detail."""
    runs, problems = find_runs(arguments.path)
    newest = [found.checkpoints[0] for found in runs]
    return show_checkpoints(newest, _shown, problems, console, in_json=arguments.json)


def _shown(checkpoint: FoundCheckpoint) -> tuple[Iterable[str], dict[str, Any]]:
    details = read_checkpoint(checkpoint, lambda: _details(checkpoint))
    if isinstance(details, str):
        return [details], {"path": checkpoint.name, "problem": details}
    return _lines(details), details


def _details(checkpoint: FoundCheckpoint) -> dict[str, Any]:
    """Return the details to show. Raise DamagedCheckpoint if a file with these details is damaged."""
    from rlhf.storage.shard_index import ShardIndex  # imports NumPy

    manifest = checkpoint.manifest()
    files, here = checkpoint.files(manifest), checkpoint.here(manifest)
    if problems := damage_in(files, [name for name in here if name.endswith((".json", INDEX))]):
        raise DamagedCheckpoint(f"{checkpoint.name} is damaged: " + "; ".join(problems))
    try:
        driver, folders = parse_driver_state(files.content(DRIVER_STATE), DRIVER_STATE, manifest.step), []
        for folder, size in _folders(manifest).items():
            document: dict[str, Any] = {"folder": folder, "bytes": size, "tensors": None}
            if f"{folder}/{INDEX}" in here:
                index = ShardIndex(files, folder)
                counts = index.counts()
                document["tensors"] = [
                    {"name": name, "dtype": dtype, "shape": list(shape), "shards": counts[name]}
                    for name, (dtype, shape) in index.tensors.items()
                ]
            folders.append(document)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{checkpoint.name} is damaged: {error}") from None
    return {
        "path": checkpoint.name,
        "problem": None,
        **facts_of(manifest),
        "size": f"{sizes_of(manifest)} in {len(manifest.files)} files",
        "linked": manifest.linked,
        "versions": manifest.versions,
        "numerics": manifest.numerics,
        "format": manifest.format,
        "imported": manifest.imported,
        "driver_state": driver,
        "folders": folders,
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    facts = {
        "checkpoint": found["path"],
        "step": found["step"],
        "created": found["created"],
        "size": found["size"],
        "ranks, backend": f"{found['ranks']}, {found['backend']}",
        "contents": ", ".join(found["contents"]),
        "linked": ", ".join(f"{folder} from {source}" for folder, source in found["linked"].items()) or "nothing",
        "versions": ", ".join(f"{k} {v}" for k, v in sorted(found["versions"].items())),
        "numerics, format": f"{found['numerics']}, {found['format']}",
    }
    if origin := found["imported"]:
        facts["imported from"] = f"{origin['path']} ({origin['layout']})"
    yield from (f"{name:16} {value}" for name, value in facts.items())
    yield "driver state"
    state = _flat(found["driver_state"])
    yield from (f"  {name:30} {value}" for name, value in islice(state, MOST))
    if (more := sum(1 for _ in state)) > 0:
        yield f"  ... and {more:,} more (--json shows all)"
    for folder in found["folders"]:
        tensors = folder["tensors"]
        count = "" if tensors is None else f", {len(tensors)} tensors"
        yield f"{folder['folder']}: {size_text(folder['bytes'])}{count}"
        for tensor in tensors or []:
            yield f"  {tensor['name']}  {tensor['dtype']} {tensor['shape']}  in {tensor['shards']} shard(s)"


def _flat(state: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield dotted names and values."""
    for name, value in sorted(state.items()):
        if isinstance(value, dict) and value and depth < DEEPEST:
            yield from _flat(value, f"{prefix}{name}.", depth + 1)
        else:
            yield _cut(prefix + name), _cut(value if isinstance(value, str) else json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _folders(manifest: Manifest) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for name, entry in manifest.files.items():
        sizes[str(Path(name).parent)] += entry["size"]
    return dict(sorted(sizes.items()))
