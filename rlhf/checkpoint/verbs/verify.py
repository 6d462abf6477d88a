"""Verb `verify`: compares every byte of checkpoints with their manifests. Loads no torch."""

import argparse
from functools import partial
from typing import Any

from rich.console import Console

from rlhf.checkpoint.commit.manifest import Manifest, damage_in
from rlhf.checkpoint.verbs.addresses import add_address, find_runs
from rlhf.checkpoint.verbs.places import REMOVED, Unreadable
from rlhf.checkpoint.verbs.runs import FoundCheckpoint, read_checkpoint
from rlhf.checkpoint.verbs.shown import show_checkpoints, sizes_of, work_bar
from rlhf.storage.disk_errors import DamagedCheckpoint

HELP = "read every byte and compare the hashes with the manifest"

DOCUMENT = (
    "`checkpoints`: `path`, `step`, `state` (`intact`, `part` of one disk, `damaged`, `other format`, `removed` by its "
    "run meanwhile), `problem`; if intact or part: `bytes`, `linked_bytes`, `files`, `files_here`"
)
add_arguments = partial(add_address, document=DOCUMENT)


def run(arguments: argparse.Namespace, console: Console) -> int:
    runs, problems = find_runs(arguments.path, in_memory=True)
    every = (checkpoint for run in runs for checkpoint in (*run.checkpoints, *run.snapshots()))
    shown = partial(_verified, named=runs[0].single_checkpoint)
    return show_checkpoints(every, shown, problems, console, in_json=arguments.json)


def _verified(checkpoint: FoundCheckpoint, *, named: bool) -> tuple[list[str], dict[str, Any]]:
    """Return a checkpoint's lines and document. If its run has removed the checkpoint, `problem` is set only if
    the user `named` this checkpoint."""
    document: dict[str, Any] = {"path": checkpoint.name, "step": checkpoint.step, "problem": None}
    manifest = read_checkpoint(checkpoint, lambda: verify_found(checkpoint))
    if isinstance(manifest, Unreadable):
        problem = manifest if named or manifest.state != REMOVED else None
        return [manifest], document | {"state": manifest.state, "problem": problem}
    here, files = len(checkpoint.here(manifest)), len(manifest.files)
    what = "intact" if here == files else f"this disk's part is intact ({here} of {files} files)"
    document |= {"step": manifest.step, "state": "intact" if here == files else "part"}
    document |= {"bytes": manifest.total_bytes, "linked_bytes": manifest.linked_bytes}
    document |= {"files": files, "files_here": here}
    return [f"{checkpoint.name}: {what}, {sizes_of(manifest)} in {files} files"], document


def verify_found(checkpoint: FoundCheckpoint) -> Manifest:
    """Read every byte of the files that must be here; raise DamagedCheckpoint with a list of the damage."""
    manifest = checkpoint.manifest()
    files, here = checkpoint.files(manifest), checkpoint.here(manifest)
    with work_bar(checkpoint.name, sum(files.size(name) for name in here)) as progress:
        problems = damage_in(files, here, progress)
    if problems:
        raise DamagedCheckpoint(f"{checkpoint.name} is damaged: " + "; ".join(problems))
    return manifest
