"""Verb `verify`: every byte of checkpoints against their manifests. Loads no torch."""

import argparse

from rich.console import Console

from rlhf.checkpoint.commit.manifest import verify
from rlhf.checkpoint.verbs.places import add_path, checkpoints_at, looked_at
from rlhf.checkpoint.verbs.shown import printable, sizes_of
from rlhf.errors import EXIT_CRASHED, EXIT_DONE

NAME = "verify"
HELP = "read every byte and compare it with the manifest"

add_arguments = add_path


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Every checkpoint at PATH, every byte."""
    worst = EXIT_DONE
    for checkpoint in checkpoints_at(arguments.path):
        manifest = looked_at(checkpoint, lambda: verify(checkpoint))  # noqa: B023
        if isinstance(manifest, str):
            worst = EXIT_CRASHED
            console.print(printable(manifest))
            continue
        here, files = len(manifest.expected_at(checkpoint)), len(manifest.files)
        what = "intact" if here == files else f"this disk's part is intact ({here} of {files} files)"
        console.print(printable(f"{checkpoint}: {what}, {sizes_of(manifest)} in {files} files"))
    return worst
