"""Limit of open files of this process and of those that it starts."""

import resource
from pathlib import Path

MOST = Path("/proc/sys/fs/nr_open")


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
