"""Runs ranks on the machines of a Ray cluster: `launcher=ray`. Ray places and restarts them."""
