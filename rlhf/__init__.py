"""An RLHF trainer with fault tolerance built in. Start at `rlhf/loop.py`; CONTRIBUTING.md has a map of the code."""

import importlib
from typing import Any

__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    """Import `train`, `UserError` and `RunEnded` at their first use."""
    if name == "train":
        return importlib.import_module("rlhf.train")
    if name in ("RunEnded", "UserError"):
        return getattr(importlib.import_module("rlhf.errors"), name)
    raise AttributeError(f"module 'rlhf' has no attribute {name!r}")
