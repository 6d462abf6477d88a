"""Policy of a run's parent process: when ranks start, restart, leave and die. A rank imports nothing of it."""
