"""Copies a run's journal before each update, since a checkpoint removes it, and interrupts the run as planned."""

import os
import shutil
from pathlib import Path
from typing import Any

from rlhf.events import LISTENER_VARIABLE
from rlhf.experience.journal import FOLDER
from tests.support import interrupter

VARIABLE = "RLHF_TEST_KEPT_JOURNAL"


def at(run_dir: Path, kept: Path, event: str = "", number: int = 0, what: str = "", **more: Any) -> dict[str, str]:
    """Return `interrupter.at` for a run whose journal is copied to the folder `kept`."""
    plan = interrupter.at(event, number, what, **more)
    return plan | {LISTENER_VARIABLE: f"{__name__}:on_event", VARIABLE: f"{run_dir}:{kept}"}


def on_event(event: str) -> None:
    if event == "update.before":
        run_dir, _, kept = os.environ[VARIABLE].partition(":")
        for path in Path(run_dir, FOLDER).glob(f"*.rank_{int(os.environ['RANK']):05d}"):
            shutil.copy(path, kept)
    interrupter.on_event(event)
