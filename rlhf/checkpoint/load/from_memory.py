"""Decides whether a resume may use a snapshot in memory: it must be of the run's present trajectory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.checkpoint.load.locations import FileLocations, locate_files
from rlhf.checkpoint.state.driver_state import parse_driver_state
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.history_file import HistoryMark
from rlhf.storage.layout import DRIVER_STATE, HISTORY
from rlhf.storage.reading import CheckedFiles


class Stale(Exception):
    """An intact snapshot that this start must not use."""


@dataclass(frozen=True)
class MemoryPlace:
    """The folder of a run's snapshots on each node. The storage domains of `coordinator` are the nodes."""

    folder: Path
    coordinator: Coordinator


def locate_snapshot(path: Path, place: MemoryPlace, run_dir: Path, last_step: int) -> FileLocations:
    """Locate the files of the snapshot at `path`. Collective.

    Raises Stale unless the nodes together have all files, the snapshot's step is at most `last_step`, and the metric
    history in `run_dir` still has the snapshot's records. The history lacks records if a rollback has rejected them, or
    a user has restored the run directory from a copy. Raises DamagedCheckpoint for a damaged snapshot.
    """
    located = locate_files(path, place.coordinator)
    if located.missing and located.may_be_elsewhere:
        raise Stale(located.missing_text())
    if located.manifest.step > last_step:
        raise Stale(f"{path.name} is after the run's last step, {last_step}")
    files = CheckedFiles(path, located.manifest.files)

    def saved() -> dict[str, Any]:
        state = parse_driver_state(files.content(DRIVER_STATE), DRIVER_STATE, located.manifest.step)
        return state.get("history", {})

    mark = place.coordinator.on_rank(located.source_domain(DRIVER_STATE), saved).get("mark")
    # Promise 17: the steps up to the snapshot have their records.
    if mark is not None and not place.coordinator.on_leader(lambda: _fits(mark, run_dir)):
        raise Stale(f"{path.name} has another metric history than {run_dir / HISTORY}")
    return located


def _fits(mark: Any, run_dir: Path) -> bool:
    try:
        return HistoryMark.parse(mark).fits(run_dir / HISTORY)
    except ValueError:
        raise DamagedCheckpoint(f"{DRIVER_STATE}: the end of the metric history is damaged") from None
