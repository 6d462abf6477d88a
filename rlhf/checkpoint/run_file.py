"""run.json: the identity of the run that a directory is of, and the checkpoint that it was forked from, if any."""

import json
from pathlib import Path
from typing import Any

from rlhf.storage.files import replace_durably
from rlhf.storage.layout import RUN_FILE


def read_run_file(run_dir: Path) -> dict[str, Any]:
    """`run_id`, and `resumed_from` when the run was forked from another checkpoint; empty when there is no such
    file."""
    path = run_dir / RUN_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def write_run_file(run_dir: Path, run: dict[str, Any]) -> None:
    """Durably, and whole at any moment."""
    replace_durably(run_dir / RUN_FILE, json.dumps(run) + "\n")
