"""Raises the limit of open files, and opens closed standard streams, for this process and its children."""

import os
import resource
import sys
from pathlib import Path

MOST = Path("/proc/sys/fs/nr_open")


def open_closed_streams() -> None:
    """Open the null device as each closed standard stream (`>&-`, as some daemons start programs). Call this first.

    Python sets a closed stream to None, and the next file or connection would get the stream's number.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # `open` returns the lowest free number, which is `number`.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit.

    The soft limit is often 1024, for programs that use select(). Connections to many servers and ranks, and the files
    of a large model, need more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:  # a soft limit above nr_open is an error
        hard = int(MOST.read_text()) if MOST.exists() else soft
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
