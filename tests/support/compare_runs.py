"""Bit-for-bit comparison of what two runs ended with."""

import json
from pathlib import Path

from rlhf.checkpoint.commit.manifest import verify
from rlhf.storage.layout import CONFIG, DRIVER_STATE, SAMPLES, scan
from rlhf.tracking.history import OF_THE_MACHINE

# Facts of a run that are no part of its trajectory; the history is compared itself, without what depends on the clock.
OF_THE_RUN = ("run_id", "wall_seconds", "history")


def driver_state(checkpoint: Path) -> dict:
    state = json.loads((checkpoint / DRIVER_STATE).read_text())
    return {key: value for key, value in state.items() if key not in OF_THE_RUN}


def history(run_dir: Path) -> list[dict]:
    """The metric history without what depends on the clock."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith(OF_THE_MACHINE)} for record in records]


def differences(left: Path, right: Path, *, samples: bool = True) -> list[str]:
    """What differs between the newest checkpoints, histories and shown samples of two run directories; empty when they
    are equal bit for bit. `samples` that were shown on another disk do not come from a remote."""
    a, b = scan(left)[0], scan(right)[0]
    files_a, files_b = verify(a).files, verify(b).files
    found = [f"only one run has {name}" for name in sorted(files_a.keys() ^ files_b.keys())]
    for name in sorted((files_a.keys() & files_b.keys()) - {DRIVER_STATE, CONFIG}):
        if (a / name).read_bytes() != (b / name).read_bytes():
            found.append(f"{name} differs")
    if a.name != b.name:
        found.append(f"the newest checkpoints are {a.name} and {b.name}")
    if driver_state(a) != driver_state(b):
        found.append(f"driver states differ: {driver_state(a)} and {driver_state(b)}")
    history_a, history_b = history(left), history(right)
    if [r["step"] for r in history_a] != [r["step"] for r in history_b]:
        found.append(f"steps of the histories: {[r['step'] for r in history_a]} and {[r['step'] for r in history_b]}")
    for record_a, record_b in zip(history_a, history_b, strict=False):
        keys = sorted(k for k in record_a.keys() | record_b.keys() if record_a.get(k) != record_b.get(k))
        if keys:
            found.append(
                f"metrics of step {record_a['step']}: "
                + ", ".join(f"{k} {record_a.get(k)} / {record_b.get(k)}" for k in keys)
            )
    if not samples:
        return found
    shown_a, shown_b = ({path.name: path.read_bytes() for path in (run / SAMPLES).glob("*")} for run in (left, right))
    names = sorted(name for name in shown_a.keys() | shown_b.keys() if shown_a.get(name) != shown_b.get(name))
    return found + [f"samples/{name} differs" for name in names]
