"""Formats the log lines of the supervisor and the ranks, and limits what other packages log."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_CHATTY = ("httpx", "httpcore", "urllib3", "filelock", "fsspec", "datasets")
_VERBOSITY = "TRANSFORMERS_VERBOSITY"


class _Lines(logging.Formatter):
    """Formats a record as the time, the process and the message, with "error:" before the message of an error."""

    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s {who}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.ERROR:
            record.message = f"error: {record.message}"
        return super().formatMessage(record)


@contextmanager
def restored_logging() -> Iterator[None]:
    """Restore a caller's log handlers, levels, warnings and TRANSFORMERS_VERBOSITY after `configure_logging`."""
    root, chatty = logging.getLogger(), [logging.getLogger(name) for name in _CHATTY]
    handlers, levels = root.handlers[:], [(each, each.level) for each in (root, *chatty)]
    shows_warnings, verbosity = warnings.showwarning, os.environ.get(_VERBOSITY)
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for logger, level in levels:
            logger.setLevel(level)
        logging.captureWarnings(capture=False)
        if warnings.showwarning is not shows_warnings:
            logging.captureWarnings(capture=True)
        if verbosity is None:
            os.environ.pop(_VERBOSITY, None)


def configure_logging(rank: int | None = None, handler: logging.Handler | None = None, who: str = "supervisor") -> None:
    """Log to `handler`, or to stderr: WARNING in ranks above 0, INFO elsewhere. Python's warnings become log lines.

    `who` names a process that is not a rank. Ranks above 0 show no progress bars.
    """
    who = who if rank is None else f"rank {rank}"
    level = logging.WARNING if rank else logging.INFO
    handler = handler or logging.StreamHandler()
    handler.setFormatter(_Lines(who))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    if rank is not None:
        # transformers reads the environment variable only at its import, and a forked rank has imported it already.
        from transformers.utils import logging as of_transformers

        if _VERBOSITY not in os.environ:
            of_transformers.set_verbosity_error()
        if rank:
            of_transformers.disable_progress_bar()
    os.environ.setdefault(_VERBOSITY, "error")  # child processes inherit the variable


def write_whole_lines() -> None:
    """Write each line to stdout and stderr in one piece, because several processes share a pipe.

    With PYTHONUNBUFFERED=1 `print` writes the end of a line separately, and another process may write in between.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
