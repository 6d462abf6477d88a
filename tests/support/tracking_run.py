"""Logs a run's steps, and may roll back or kill itself: RUN_DIR LOGGER MODE RESUME_STEP|none LAST_STEP [KILL_AT]
[AT:BACK_TO ...]."""

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from rlhf.config import Config
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.tracking import Tracker, mlflow, wandb
from rlhf.tracking.run_log import RunLog
from rlhf.tracking.sample_files import VALIDATION

RUN_ID = "r4nd0m1d"


def metrics(step: int) -> dict[str, float]:
    """Return the same metrics for a step in every launch, as in deterministic training."""
    evaluation = {"val/accuracy": 1 - 1 / (step + 2)} if step % 5 == 0 else {}
    return {"reward/mean": step / 7, "tokens/total": step * 1000} | evaluation


def main() -> None:
    wandb.INIT_TIMEOUT_S = wandb.FINISH_TIMEOUT_S = 2.0
    mlflow.FINISH_TIMEOUT_S = float(os.environ.get("RLHF_TEST_FINISH_S", mlflow.FINISH_TIMEOUT_S))
    run_dir, logger, mode, resume_step, last, *events = sys.argv[1:]
    rewinds = dict(tuple(map(int, event.split(":"))) for event in events if ":" in event)
    config = Config()
    config.trainer.logger = [logger]
    if logger == "mlflow":
        config.tracking.mlflow.tracking_uri = mode
    else:
        config.tracking.wandb.mode = mode
    tracker = Tracker(config.trainer, config.tracking, asdict(config), Path(run_dir), RUN_ID)
    run_log = RunLog(tracker, ProgressDisplay(), int(last))
    step = 0 if resume_step == "none" else int(resume_step) + 1
    run_log.start(max(step - 1, 0), resumed=resume_step != "none")
    while step <= int(last):
        if "val/accuracy" in metrics(step):
            run_log.show([{"split": VALIDATION, "response": f"says {step}", "score": 0.5}])
        run_log.step(step, metrics(step))
        if str(step) in events:
            os.kill(os.getpid(), signal.SIGKILL)
        if step in rewinds:
            run_log.rewind(step := rewinds.pop(step))
        step += 1
    run_log.close()


if __name__ == "__main__":
    main()
