"""Implements rlhf.train's command line, and the commands plan, doctor, samples, compare, report, status, translate."""
