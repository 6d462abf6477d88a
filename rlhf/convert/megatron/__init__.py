"""Megatron's layouts, by ranks and distributed, read and written."""
