"""Checkpoints of other tools, and ours as they know them; nothing of the trainer imports it."""
