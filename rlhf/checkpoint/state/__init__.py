"""Defines a run's state beside its tensors, and the live objects that are saved and restored."""
