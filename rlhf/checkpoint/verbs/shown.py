"""Formats sizes, prints documents as JSON, and shows the progress of a long verb. Imports no torch."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.verbs.runs import FoundCheckpoint
from rlhf.errors import EXIT_CRASHED, EXIT_DONE
from rlhf.printable import printable


def sizes_of(manifest: Manifest) -> str:
    linked = f" and {size_text(manifest.linked_bytes)} linked" if manifest.linked else ""
    return size_text(manifest.total_bytes) + linked


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """Return an intact checkpoint's facts for a document. Leave out its list of files, which needs much memory."""
    return {
        "step": manifest.step,
        "created": manifest.created,
        "size": sizes_of(manifest),
        "bytes": manifest.total_bytes,
        "linked_bytes": manifest.linked_bytes,
        "files": len(manifest.files),
        "ranks": manifest.world_size,
        "backend": manifest.backend,
        "contents": manifest.contents,
        "metrics": manifest.metrics,
    }


def size_text(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def as_json(document: Any) -> str:
    """Return JSON for a script: printable ASCII only, and null for numbers that JSON lacks."""
    return json.dumps(json.loads(json.dumps(document), parse_constant=lambda constant: None), indent=1)


def show_checkpoints(
    checkpoints: Iterable[FoundCheckpoint],
    describe: Callable[[FoundCheckpoint], tuple[Iterable[str], dict[str, Any]]],
    unreadable: list[str],
    console: Console,
    *,
    in_json: bool,
) -> int:
    """Print the lines of each checkpoint, or all documents as JSON, and return the exit code. `describe` returns a
    checkpoint's lines and its document. The document's `problem` is None for an intact checkpoint."""
    documents = []
    for checkpoint in checkpoints:
        lines, document = describe(checkpoint)
        documents.append(document)
        for line in () if in_json else lines:
            console.print(printable(line))
    show_end({"checkpoints": documents}, unreadable, console, in_json=in_json)
    return EXIT_CRASHED if unreadable or any(each["problem"] is not None for each in documents) else EXIT_DONE


def show_end(document: dict[str, Any], unreadable: list[str], console: Console, *, in_json: bool) -> None:
    """Print the document and the unreadable folders as JSON; without `in_json`, print a line per unreadable folder."""
    if in_json:
        console.out(as_json(document | {"unreadable": unreadable}))
        return
    for line in unreadable:
        console.print(printable(line))


def nonfinite_as_text(value: Any) -> Any:
    """Return `value` with NaN and infinities, which JSON lacks, as texts."""
    if isinstance(value, dict):
        return {name: nonfinite_as_text(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def work_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds processed bytes to a progress bar on stderr, or does nothing without a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    name = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    columns = (name, BarColumn(10), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(printable(what), total=total_bytes)
        yield lambda count: bar.advance(task, count)
