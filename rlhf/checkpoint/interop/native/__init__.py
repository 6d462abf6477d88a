"""Checkpoints of ours, read and written as other layouts are."""
