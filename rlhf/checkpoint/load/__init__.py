"""Loads a checkpoint: locates its files, checks that it fits the run, and restores live state."""
