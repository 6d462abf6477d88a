"""Reads, plans and writes Hugging Face folders; reads tensors of any open checkpoint by name."""
