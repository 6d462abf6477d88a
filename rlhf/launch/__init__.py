"""Parent process of a run: starts, watches, restarts and ends the ranks. A rank imports nothing of it."""
