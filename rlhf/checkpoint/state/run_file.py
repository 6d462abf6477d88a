"""Reads and writes run.json: the id and start day of a directory's run, the source of a fork, and the launch."""

import json
from pathlib import Path
from typing import Any

from rlhf.checkpoint.state.driver_state import is_day
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import replace_durably
from rlhf.storage.layout import RUN_FILE
from rlhf.storage.reading import parse_json, read_regular

LARGEST = 1 << 20
AGENTS = "agents"
"""Key of the launch's names: a scheduler's job, or torchrun processes. A restart must keep the checkpoints of its
launch, even with `trainer.overwrite=true` or `trainer.resume_mode=disable`."""
STARTED_ON = "started_on"
"""Key of the day of the run's start (ISO), which chat templates print in every attempt."""


def read_run_file(run_dir: Path) -> dict[str, Any]:
    """Return run.json: `run_id`, `STARTED_ON`, `resumed_from` for a fork, perhaps `AGENTS`; empty without a file.

    Raises UserError for a damaged file.
    """
    path = run_dir / RUN_FILE
    try:
        run = parse_json(read_regular(path, LARGEST), RUN_FILE)
        if not isinstance(run, dict) or not isinstance(run.get("run_id"), str):
            raise DamagedCheckpoint(f"{RUN_FILE}: has no run_id")
        if STARTED_ON in run and not is_day(run[STARTED_ON]):
            raise DamagedCheckpoint(f"{RUN_FILE}: {STARTED_ON} is not a date")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except DamagedCheckpoint as problem:
        raise UserError(f"{path} is damaged ({problem}). Remove the file; a checkpoint has the run's id.") from None
    return run


def write_run_file(run_dir: Path, run: dict[str, Any]) -> None:
    """Replace run.json atomically and durably."""
    replace_durably(run_dir / RUN_FILE, json.dumps(run) + "\n")
