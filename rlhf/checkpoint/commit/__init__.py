"""Commits checkpoints: manifest, publication over storage domains, pointer, retention, removal."""
