"""Ranks as processes of this machine, forked from a launcher or started as new processes."""
