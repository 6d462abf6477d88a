"""An RLHF trainer with fault tolerance built in. Start at `rlhf/loop.py`; CONTRIBUTING.md has the map of the house."""

__version__ = "0.1.0"
