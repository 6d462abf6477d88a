"""Logs the steps of a run, may kill itself: RUN_DIR LOGGER MODE RESUME_STEP|none LAST_STEP [KILL_AT]."""

import os
import signal
import sys
from pathlib import Path

from rlhf.config import Config
from rlhf.tracking import Tracker, wandb

RUN_ID = "r4nd0m1d"


def metrics(step: int) -> dict[str, float]:
    """The same values for a step in every launch, as in a deterministic training."""
    evaluation = {"val/accuracy": 1 - 1 / (step + 2)} if step % 5 == 0 else {}
    return {"reward/mean": step / 7, "tokens/total": step * 1000} | evaluation


def main() -> None:
    wandb.INIT_TIMEOUT_S = wandb.FINISH_TIMEOUT_S = 2.0
    run_dir, logger, mode, resume_step, last, *kill_at = sys.argv[1:]
    config = Config()
    config.trainer.logger = [logger]
    config.tracking.wandb.mode = mode
    tracker = Tracker(config, Path(run_dir), RUN_ID)
    first = 0 if resume_step == "none" else int(resume_step) + 1
    tracker.start(None if resume_step == "none" else int(resume_step))
    for step in range(first, int(last) + 1):
        tracker.log(step, metrics(step))
        if [str(step)] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    tracker.finish()


if __name__ == "__main__":
    main()
