"""Copies checkpoints to a remote folder behind the training, and downloads them at the start."""
