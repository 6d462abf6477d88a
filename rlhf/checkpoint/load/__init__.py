"""Locates a checkpoint's files, checks that the checkpoint fits the run, and restores live state."""
