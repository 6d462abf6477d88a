"""Reads DeepSpeed's own checkpoints."""
