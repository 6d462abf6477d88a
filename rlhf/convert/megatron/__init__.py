"""Reads and writes Megatron's layouts, by ranks and distributed."""
