"""Checkpoints of other tools, and ours as they know them."""
