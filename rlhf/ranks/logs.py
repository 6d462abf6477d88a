"""One format for the log lines of the supervisor and the ranks, without the chatter of libraries."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_CHATTY = ("httpx", "httpcore", "urllib3", "filelock", "fsspec", "datasets", "matplotlib")
_VERBOSITY = "TRANSFORMERS_VERBOSITY"


class _Lines(logging.Formatter):
    """Formats a record as the time, the process and the message, with "error:" before the message of an error."""

    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s {who}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line."""
        if record.levelno >= logging.ERROR:
            record.message = f"error: {record.message}"
        return super().formatMessage(record)


@contextmanager
def logging_put_back() -> Iterator[None]:
    """Around a `configure_logging` in a process of somebody else's: its log handlers, levels, warnings and environment
    are afterwards as they were."""
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
    """Log to `handler`, or to stderr: INFO in rank 0, WARNING in the other ranks, which show no progress bars either,
    and INFO in a process that is not a rank, which `who` names. Python's warnings are log lines as well."""
    who = who if rank is None else f"rank {rank}"
    level = logging.WARNING if rank else logging.INFO
    handler = handler or logging.StreamHandler()
    handler.setFormatter(_Lines(who))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    if rank is not None:
        # Environment variables come too late: the library reads them when it is imported, which a rank has done.
        from transformers.utils import logging as of_transformers

        if _VERBOSITY not in os.environ:
            of_transformers.set_verbosity_error()
        if rank:
            of_transformers.disable_progress_bar()
    os.environ.setdefault(_VERBOSITY, "error")  # for processes that this one starts


def write_whole_lines() -> None:
    """Let stdout and stderr leave this process line by line, each line in one piece: several processes write into one
    pipe, and with PYTHONUNBUFFERED=1 `print` would write the end of a line by itself, after which others may come."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
