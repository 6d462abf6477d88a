"""verl's checkpoints of FSDP, read."""
