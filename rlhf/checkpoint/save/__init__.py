"""Saves: the snapshot, its copy in memory, room on the disk, and the writing of it."""
