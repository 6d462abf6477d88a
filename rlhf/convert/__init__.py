"""Reads and writes checkpoints of other tools; the trainer imports nothing from this folder."""
