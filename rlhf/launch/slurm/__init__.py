"""Submits runs to SLURM: `python -m rlhf.launch.slurm`."""
