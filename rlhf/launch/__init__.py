"""The parent process of a run: decides when ranks start, restart, leave and are killed. Ranks import nothing of it."""
