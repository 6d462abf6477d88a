"""Times that the scripts and manifests for schedulers share."""

from rlhf.config.schema.trainer import TrainerConfig

SPARE_S = 60
"""Seconds between the end of `trainer.preempt_grace_s` and the scheduler's kill, for the last processes to end. SLURM
may send its signal this much early or late."""
PEERS_S = 120
"""Seconds after the end of one rank until srun or the pod kills the ranks that wait for it."""


def stop_notice_s(trainer: TrainerConfig) -> int:
    """Return how many seconds before the kill the scheduler asks the run to save and leave."""
    return int(trainer.preempt_grace_s) + SPARE_S
