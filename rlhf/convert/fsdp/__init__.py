"""Reads verl's FSDP checkpoints."""
