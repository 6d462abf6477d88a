"""Checkpoints of ours, written from the tensors of any other."""
