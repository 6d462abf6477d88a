"""Starts a run: finds storage domains and prepares run directories before the ranks train."""
