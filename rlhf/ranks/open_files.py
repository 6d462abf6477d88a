"""Open files of this process and of those that it starts: their limit, and the standard streams among them."""

import os
import resource
import sys
from pathlib import Path

MOST = Path("/proc/sys/fs/nr_open")


def open_closed_streams() -> None:
    """Put the null device in the place of standard streams that were closed (`>&-`, as some daemons start programs):
    Python has None for them, and files and connections would get their numbers. Call it first thing."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one.

    The soft one is 1024 on most systems, for the sake of programs that use select(); connections to many servers and
    ranks, and the files of a large model, take more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:  # which the kernel sets for nobody
        hard = int(MOST.read_text()) if MOST.exists() else soft
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
