"""Command lines of python -m rlhf.train, rlhf.plan, rlhf.samples and rlhf.compare."""
