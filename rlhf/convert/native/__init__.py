"""Writes native checkpoints from the tensors of any other checkpoint."""
