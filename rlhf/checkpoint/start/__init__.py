"""Start of a run: its storage domains and run directories, before the ranks train."""
