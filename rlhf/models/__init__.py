"""Policies: how they are loaded, and the small offline one that comes with the package."""
