"""One format for the log lines of the supervisor and the ranks, without the chatter of libraries."""

import logging
import os

_CHATTY = ("httpx", "httpcore", "urllib3", "filelock", "fsspec", "datasets", "matplotlib")


def configure_logging(rank: int | None = None) -> None:
    """Log to stderr: INFO in the supervisor (rank None) and in rank 0, WARNING in the other ranks.

    Call it before transformers is imported.
    """
    handler = logging.StreamHandler()
    who = "supervisor" if rank is None else f"rank {rank}"
    level = logging.WARNING if rank else logging.INFO
    logging.basicConfig(
        level=level, format=f"%(asctime)s {who}: %(message)s", datefmt="%H:%M:%S", handlers=[handler], force=True
    )
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if rank:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
