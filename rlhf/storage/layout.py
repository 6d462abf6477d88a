"""Names the files of run directories and checkpoints, and scans for checkpoints. Imports no torch."""

import re
import uuid
from pathlib import Path

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
DRIVER_STATE = "driver_state.json"
CARRIED = "driver_state"
REFERENCE = "ref/model"
SCHEDULE = "extra/lr_scheduler.json"
HF_FOLDER = "huggingface"
CONFIG = "config.yaml"
INDEX = "index.safetensors"
RUN_FILE = "run.json"
RESOLVED = "resolved.yaml"
HISTORY = "metrics.jsonl"
EVENTS = "events.jsonl"
ALERTS = "alerts.jsonl"
SAMPLES = "samples"
RUN_LOG = "run.log"
STEP_PREFIX = "global_step_"
TEMPORARY = ".tmp-"
TRASH = ".trash-"
UPLOAD = ".upload-"
"""Prefix of a folder of hard links to a checkpoint's files during their copy to `checkpoint.remote`."""

# One name per step: no leading zeros, no digits of other scripts.
_STEP_DIR = re.compile(r"global_step_(0|[1-9][0-9]*)")
_SET_ASIDE = re.compile(r"global_step_[0-9]+\.(damaged|superseded|incomplete)-[0-9]+")


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / f"{STEP_PREFIX}{step}"


def step_of(path: Path) -> int | None:
    """Return the step in a published directory's name, or None for any other name."""
    match = _STEP_DIR.fullmatch(path.name)
    return int(match.group(1)) if match else None


def scan(run_dir: Path) -> list[Path]:
    """Return the published directories, newest step first. The pointer file is only a hint for users and tools."""
    if not run_dir.is_dir():
        return []
    found = {step: path for path in run_dir.iterdir() if (step := step_of(path)) is not None and path.is_dir()}
    return [found[step] for step in sorted(found, reverse=True)]


def set_aside_dirs(run_dir: Path, reason: str) -> list[Path]:
    """Return directories that an earlier resume set aside for `reason` ("damaged", "superseded" or "incomplete")."""
    if not run_dir.is_dir():
        return []
    return sorted(p for p in run_dir.iterdir() if (m := _SET_ASIDE.fullmatch(p.name)) and m.group(1) == reason)


def fresh_name(prefix: str, what: str) -> str:
    """Return a name that no other process, now or before a crash, has used."""
    return f"{prefix}{what}-{uuid.uuid4().hex[:12]}"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"
