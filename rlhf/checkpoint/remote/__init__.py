"""Copies of checkpoints in a remote folder: made behind the training, fetched at the start."""
