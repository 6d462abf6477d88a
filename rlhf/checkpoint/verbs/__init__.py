"""Implements the verbs of python -m rlhf.checkpoint, a module each, imported on demand."""
