"""Publishes snapshots of the state in the memory of each node, from which a restart continues after a crash."""
