"""State of a run beside its tensors, and the live objects that are saved and restored."""
