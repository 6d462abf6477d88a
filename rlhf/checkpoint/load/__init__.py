"""Loads: where a checkpoint's files lie, whether it fits the run, and its way into live state."""
