"""Command lines of python -m rlhf.train, rlhf.plan, rlhf.samples, rlhf.compare and rlhf.translate."""
