"""Explains how to continue a run: with `trainer.overwrite=true`, the same command would delete its checkpoints."""

import os

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.ranks.parent import LAUNCH, torchrun_agent
from rlhf.ranks.stop import RERUN_HINT


def changes_to_continue(trainer: TrainerConfig) -> str:
    """Return the words after "the same command" that make the command continue its run.

    The words begin with a space. They are empty if the command continues the run as it is.
    """
    words = [" without trainer.overwrite=true"] if trainer.overwrite else []
    words += [" with trainer.resume_mode=auto"] if trainer.resume_mode == "disable" else []
    return " and".join(words)


def next_start(where: object | None, trainer: TrainerConfig) -> str:
    """Return a sentence on how to continue the run from the checkpoint `where` (None: the run has no checkpoint)."""
    if where is None:
        return RERUN_HINT
    changes = changes_to_continue(trainer)
    command = f"The same command{changes}"
    if changes and (os.environ.get(LAUNCH) or torchrun_agent()):
        command = f"A restart by the launcher, or the same command{changes},"
    text = f"{command} continues from {where}."
    if trainer.overwrite:
        text += " Giving the command again with trainer.overwrite=true deletes all checkpoints."
    return text
