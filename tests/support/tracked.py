"""Reads a run's records with its trackers' own readers."""

import json
import subprocess
import sys
from pathlib import Path

from rlhf.tracking.sample_files import GENERATIONS


def tensorboard_curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars by name, as (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard_tables(run_dir: Path) -> dict[int, str]:
    """Return the sample tables by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    return {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"{GENERATIONS}/text_summary")}


def wandb_items(segment: Path, run_id: str) -> list[dict]:
    """Return the history in the `.wandb` file of a run's offline folder."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(segment / f"run-{run_id}.wandb")]
    end = subprocess.run(command, cwd=segment, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    records = [json.loads(line) for line in end.stdout.splitlines() if line.startswith("{")]
    return [record["history"]["item"] for record in records if record.get("type") == "history"]
