"""Checks that checkpoint.remote can be reached and written."""

from collections.abc import Iterator
from pathlib import Path

from rlhf.checkpoint.remote.remote_start import open_remote
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.diagnosis.check_result import Outcome, ok, warning


def check_remote(run_dir: Path, trainer: TrainerConfig, checkpoint: CheckpointConfig) -> Iterator[Outcome]:
    """Write and remove a small object in the run's remote folder. Raise UserError with the remedy if this fails."""
    if checkpoint.remote is None:
        yield ok("checkpoint.remote is not set")
    elif open_remote(run_dir, trainer, checkpoint) is None:
        yield warning(f"checkpoint.remote={checkpoint.remote} does not answer. Check the network; the run tries again.")
    else:
        yield ok(f"checkpoint.remote={checkpoint.remote} is reachable and writable")
