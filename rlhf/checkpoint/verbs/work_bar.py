"""Progress of a long verb: a bar on stderr where that is a terminal, nothing elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rlhf.printable import printable


@contextmanager
def work_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A function that counts bytes done of `total_bytes`."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(what), total=total_bytes)
        yield lambda count: bar.advance(task, count)
