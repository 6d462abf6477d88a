"""Command lines: options of the trainer, and what stands behind python -m rlhf.plan and rlhf.samples."""
