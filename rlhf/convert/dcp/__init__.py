"""Reads and writes folders of torch.distributed.checkpoint (DCP)."""
