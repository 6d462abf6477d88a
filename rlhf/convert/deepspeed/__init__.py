"""DeepSpeed's own checkpoints, read."""
