"""Copies checkpoints to a remote folder during the training, and downloads them at the start."""
