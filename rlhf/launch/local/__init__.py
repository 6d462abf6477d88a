"""Runs the ranks as processes of this machine: forks of a launcher, or new processes."""
