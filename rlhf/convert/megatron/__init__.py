"""Reads and writes Megatron checkpoints: one file per rank (`mp_rank`), and distributed (`torch_dist`)."""
