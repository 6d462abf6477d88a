"""Command lines of python -m rlhf.train, rlhf.plan and rlhf.samples."""
