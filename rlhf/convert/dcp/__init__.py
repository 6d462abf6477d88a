"""Folders of torch.distributed.checkpoint, read and written."""
