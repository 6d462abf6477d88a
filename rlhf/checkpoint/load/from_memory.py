"""Decides whether a resume may use a snapshot in memory: it must be of the run's present trajectory."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.checkpoint.load.locations import FileLocations, locate_files
from rlhf.checkpoint.load.verification import locate_intact
from rlhf.checkpoint.state.driver_state import parse_driver_state
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.history_file import HistoryMark
from rlhf.storage.layout import DRIVER_STATE
from rlhf.storage.reading import CheckedFiles

log = logging.getLogger(__name__)


class Stale(Exception):
    """This start must not use the snapshot, although the snapshot may be undamaged."""


@dataclass(frozen=True)
class HistoryPlace:
    """The metric history, which is on the disk of rank 0's node. `on_own_disk`: other nodes have other disks."""

    path: Path
    on_own_disk: bool


@dataclass(frozen=True)
class MemoryPlace:
    """The folder of a run's snapshots on each node. The storage domains of `coordinator` are the nodes."""

    folder: Path
    coordinator: Coordinator


def locate_snapshot(path: Path, place: MemoryPlace, history: HistoryPlace, last_step: int) -> FileLocations:
    """Locate the intact files of the snapshot at `path`, after reading all its bytes on all nodes. Collective.

    Raises Stale unless the nodes together have all files, the snapshot's step is at most `last_step`, and the metric
    history still has the snapshot's records. The history lacks records if a rollback has rejected them, or a user has
    restored the run directory from a copy. Raises DamagedCheckpoint if a file is damaged on all nodes that have it.
    """
    ranks = place.coordinator
    located = locate_files(path, ranks)
    if located.missing and located.may_be_elsewhere:
        raise Stale(located.missing_text("memory"))
    if located.manifest.step > last_step:
        raise Stale(f"{path.name} is after the run's last step, {last_step}")
    # Promise 4. Read all bytes before the load overwrites the state. If this snapshot is damaged and nothing older is
    # left, the run begins at step 0 and needs its initial state intact.
    located = locate_intact(located, ranks)
    files = CheckedFiles(path, located.manifest.files)

    def saved() -> dict[str, Any]:
        state = parse_driver_state(files.content(DRIVER_STATE), DRIVER_STATE, located.manifest.step)
        return state.get("history", {})

    mark = ranks.on_rank(located.source_domain(DRIVER_STATE), saved).get("mark")
    # Promise 17: the steps up to the snapshot have their records.
    if mark is None or ranks.on_leader(lambda: _fits(mark, history.path)):
        return located
    # Fewer ranks than at the save: nodes whose disks had the history may be gone.
    fewer = located.manifest.world_size > ranks.world_size
    if (history.on_own_disk or fewer) and not ranks.on_leader(history.path.exists):
        if ranks.is_leader:
            log.error(
                "The metric history was lost with the disk of rank 0's node. It begins again after %s.", path.name
            )
        return located
    raise Stale(f"{path.name} has another metric history than {history.path}")


def _fits(mark: Any, history: Path) -> bool:
    try:
        return HistoryMark.parse(mark).fits(history)
    except ValueError:
        raise DamagedCheckpoint(f"{DRIVER_STATE}: the end of the metric history is damaged") from None
