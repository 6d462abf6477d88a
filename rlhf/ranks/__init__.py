"""Ranks of a run: what each needs of the others and of the parent process."""
