"""The parent process of a run: starts, restarts, stops and kills the ranks. Ranks import nothing from this package."""
