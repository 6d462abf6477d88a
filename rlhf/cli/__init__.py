"""Command lines of rlhf.train, rlhf.plan, rlhf.samples, rlhf.compare, rlhf.report, rlhf.status and rlhf.translate."""
