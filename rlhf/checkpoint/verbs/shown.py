"""Shows sizes as texts, documents as JSON, and the progress of a long verb. Imports no torch."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.printable import printable


def sizes_of(manifest: Manifest) -> str:
    linked = f" and {size_text(manifest.linked_bytes)} linked" if manifest.linked else ""
    return size_text(manifest.total_bytes) + linked


def size_text(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def as_json(document: Any) -> str:
    """Return JSON for a script: printable ASCII only, and null for numbers that JSON lacks."""
    return json.dumps(json.loads(json.dumps(document), parse_constant=lambda constant: None), indent=1)


def spelled(value: Any) -> Any:
    """Return `value` with each number that JSON lacks, such as NaN, as text."""
    if isinstance(value, dict):
        return {name: spelled(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def work_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts bytes done of `total_bytes`: in a bar on stderr where that is a terminal."""
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
