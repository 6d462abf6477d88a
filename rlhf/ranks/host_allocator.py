"""Sets up glibc's allocator for a rank on the CPU, so that each pass reuses the memory of the pass before."""

import ctypes
import os

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt (malloc.h)."""
OPTIONS = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 1 << 30, TOP_PAD: 32 << 20}
"""Bytes by parameter. 32 MiB is the largest MMAP_THRESHOLD that glibc accepts. TOP_PAD must stay below 64 MiB, the size
of a heap of a thread other than the main thread: with 64 MiB, glibc never freed such heaps, and 1.5 GB stayed after
three threads had dropped tensors of 1.6 GB."""


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations, and return whether it does.

    By default glibc returns a tensor's memory to the kernel when the tensor dies. The kernel then has to zero each page
    of the next tensor, which takes more than a tenth of an update's time. Users' own settings of glibc's allocator
    (`MALLOC_*` or `GLIBC_TUNABLES` in the environment) stay in force. Other C libraries have no mallopt and keep
    their defaults.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(parameter, size) == 1 for parameter, size in OPTIONS.items())
