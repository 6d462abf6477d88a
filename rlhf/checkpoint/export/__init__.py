"""Whole checkpoints of ours as named tensors, and as Hugging Face folders."""
