"""Folders of models as on the Hub, read in ranges, planned and written; named tensors of any open checkpoint."""
