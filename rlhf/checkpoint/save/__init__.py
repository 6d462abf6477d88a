"""Saves a checkpoint: takes a snapshot, copies it to memory, frees disk space, and writes the files."""
