"""Saves a checkpoint: takes a snapshot, copies it to memory, makes room on the disk, and writes it."""
