"""Verbs of python -m rlhf.checkpoint, a module each; one is imported only when it is asked for."""
