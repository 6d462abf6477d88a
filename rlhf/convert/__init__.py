"""Reads and writes checkpoints of other tools; the trainer imports nothing of this folder."""
