"""Opens whole native checkpoints as named tensors, and writes them as Hugging Face folders."""
