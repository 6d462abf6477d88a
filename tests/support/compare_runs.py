"""Compares the ends of two runs bit for bit."""

import json
from pathlib import Path

from rlhf.storage.layout import CONFIG, DRIVER_STATE, SAMPLES, scan
from rlhf.tracking.history import MACHINE_METRICS
from tests.support.verified import verify

ENV_FAILURES = "perf/env_failures"
OF_LOG_PROBS = ("rollout/logprob_diff", "rollout/kl", "rollout/is_")
"""Prefixes of the metrics that follow from the rollout's log-probs without a threshold."""
# Fields of a run that are not part of its trajectory. The history is compared separately, without clock metrics.
OF_THE_RUN = ("run_id", "started_on", "wall_seconds", "history")


def driver_state(checkpoint: Path) -> dict:
    state = json.loads((checkpoint / DRIVER_STATE).read_text())
    return {key: value for key, value in state.items() if key not in OF_THE_RUN}


def history(run_dir: Path) -> list[dict]:
    """Return the metric history without metrics of the clock.

    In a step with a failed environment (promise 7), the repeated episode has turns in other batches, so metrics of the
    rollout's log-probs may differ by rounding: leave them out.
    """
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    left_out = [(*MACHINE_METRICS, *OF_LOG_PROBS) if each.get(ENV_FAILURES) else MACHINE_METRICS for each in records]
    return [
        {key: value for key, value in record.items() if not key.startswith(prefixes)}
        for record, prefixes in zip(records, left_out, strict=True)
    ]


def _lacks_log_probs(record: dict) -> bool:
    return not any(key.startswith(OF_LOG_PROBS) for key in record)


def differences(left: Path, right: Path, *, samples: bool = True) -> list[str]:
    """Return the differences between two run directories' newest checkpoints, histories and shown samples.

    Empty if all are equal bit for bit. Disable `samples` after a restore from a remote, which has no samples.
    """
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
        left_out = OF_LOG_PROBS if _lacks_log_probs(record_a) != _lacks_log_probs(record_b) else ()
        either = [key for key in record_a.keys() | record_b.keys() if not key.startswith(left_out)]
        keys = sorted(key for key in either if record_a.get(key) != record_b.get(key))
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
