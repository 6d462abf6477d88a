"""Ranks that are processes of this machine: forked from a launcher or started plainly, known by process ids."""
