"""Implements the verbs of python -m rlhf.checkpoint that read or write other tools' checkpoints, one per module."""
