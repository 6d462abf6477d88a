"""Writes the status file of each rank, `status/rank_R.json`: its newest event, and the error that ended it."""

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf.errors import UserError
from rlhf.storage.files import make_dir, remove_file, rename

STATUS_DIR = "status"
STARTING = "start"
"""The event of a rank that has announced no event yet."""
STACKS_SIGNAL = signal.SIGUSR2
SAVE_BEGINS, SAVE_ENDS = "commit.before", "commit.after"
"""First and last event of a background save, which runs in a thread of its own."""
SCORES = "reward.begin"
"""Event of the loop when it scores, or waits for threads that score."""
SCORED = "reward.scored"
WAITS_FOR_SCORE = "reward.wait"
"""Events of a thread that scores. The thread has scored a sample, or waits for a score with a deadline."""
SCORES_EARLY = "reward.early"
"""Event of the loop when it passes a complete group to a thread that scores. The loop does not wait for the scores, and
the event begins no phase."""

_OF_SCORES = (SCORES, SCORED, WAITS_FOR_SCORE)
_PAGE = 4096
# Equal events within this many seconds are written once, which suffices to show that the rank makes progress.
_REPEAT_S = 0.1


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank. A `user` error needs a fix by the user, a `crash` needs a restart.

    `unsaved`: the rank obeyed a request to stop, or finished, but could not save. `traceback` is formatted, or empty.
    """

    kind: Literal["user", "crash", "unsaved"]
    message: str
    traceback: str


@dataclass(frozen=True)
class SaveStatus:
    """The newest event of a background save, its time, and the identity of the saving thread."""

    event: str
    time: float
    thread: int


@dataclass(frozen=True)
class PhaseStatus:
    """A rank's phase in words for users, the done and total numbers of its parts (0 without parts), and its start."""

    name: str
    done: int
    total: int
    since: float


@dataclass(frozen=True)
class RankStatus:
    """A rank's step, the newest event of its loop, the time of this event, and the rank's error.

    Times are seconds of the monotonic clock, which all processes of a machine share and which is never set. `thread` is
    the identity of the loop's thread. `save` is the status of the running background save, if any.
    """

    step: int | None
    event: str
    time: float
    error: RankError | None
    thread: int = 0
    save: SaveStatus | None = None
    phase: PhaseStatus | None = None


class StatusWriter:
    """Writes the status of one rank in place into one page. SIGUSR2 writes the rank's stacks into another file.

    Create the writer in the thread of the loop. Writing an event takes about 20 microseconds (a rename takes about 1000
    on ext4). A kill cannot tear a write within one page. The page is written at the start, so that a rank can report a
    full disk later. Nothing is fsynced, because after a power failure it does not matter which rank failed first.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        path = run_dir / STATUS_DIR / f"rank_{rank}.json"
        make_dir(path.parent)
        dump_stacks_on_signal(stacks_file(run_dir, rank))
        self._lock = threading.Lock()
        self._status = RankStatus(None, STARTING, time.monotonic(), None, threading.get_ident())
        new = path.with_suffix(".new")
        self._fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write(self._status)
        rename(new, path)

    def event(self, step: int | None, event: str) -> None:
        """Write that `event` happens now, in `step` (None before the first step is known).

        For threads other than the loop's, this method writes only two kinds of events. Events of a background save,
        from SAVE_BEGINS to SAVE_ENDS, go to `save`. SCORED and WAITS_FOR_SCORE renew the time of the loop's SCORES,
        because the loop then waits for the threads that score. At other times these threads work beside the loop, and
        the watchdog would mistake their events for the loop's.
        """
        thread, now = threading.get_ident(), time.monotonic()
        with self._lock:
            repeats = now - self._status.time < _REPEAT_S
            if event == SCORES_EARLY:
                return
            if thread == self._status.thread:
                if (step, event) == (self._status.step, self._status.event) and repeats:
                    return
                self._status = replace(self._status, step=step, event=event, time=now)
            elif event == SAVE_BEGINS or (self._status.save and self._status.save.thread == thread):
                save = None if event == SAVE_ENDS else SaveStatus(event, now, thread)
                self._status = replace(self._status, save=save)
            elif event in _OF_SCORES and self._status.event in _OF_SCORES and not repeats:
                self._status = replace(self._status, time=now)
            else:
                return
            self._write(self._status)

    def phase(self, name: str, done: int, total: int) -> None:
        """Write the phase for readers in other terminals. The time of the newest event stays as it is."""
        with self._lock:
            before = self._status.phase
            since = before.since if before is not None and before.name == name else time.monotonic()
            self._status = replace(self._status, phase=PhaseStatus(name, done, total, since))
            self._write(self._status)

    def error(self, kind: Literal["user", "crash", "unsaved"], message: str, traceback: str = "") -> None:
        """Write why the rank is about to end. Step and event stay as they are.

        To fit into the page, the start of the traceback is cut off, then the end of the message.
        """
        with self._lock:
            # Store the error, because a background save may still write the status.
            self._status = replace(self._status, time=time.monotonic(), error=RankError(kind, message, traceback))
            while not self._write(self._status):
                if traceback:
                    traceback = traceback[len(traceback) // 4 + 1 :]
                else:
                    message = message[: len(message) * 3 // 4]
                self._status = replace(self._status, error=RankError(kind, message, traceback))

    def _write(self, status: RankStatus) -> bool:
        record = json.dumps(asdict(status)).encode()
        if len(record) > _PAGE:
            return False
        os.pwrite(self._fd, record.ljust(_PAGE), 0)
        return True


def read_statuses(run_dir: Path, ranks: Collection[int] | None = None) -> dict[int, RankStatus]:
    """Return the statuses by rank, of `ranks` or of all. The status of a live rank may be missing for a moment.

    A watchdog must name its node's ranks: on 128 nodes with a shared folder, each would read 1,024 files at each look.

    Raises:
        UserError: a file has JSON that no rank writes.
    """
    statuses = {}
    folder = run_dir / STATUS_DIR
    for path in folder.glob("rank_*.json") if ranks is None else [folder / f"rank_{rank}.json" for rank in ranks]:
        try:
            fields = json.loads(path.read_text())
        except (ValueError, FileNotFoundError):  # the rank was writing, or another process cleared the folder
            continue
        try:
            statuses[int(path.stem.removeprefix("rank_"))] = _parsed(fields)
        except (TypeError, LookupError, AttributeError, ValueError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise UserError(f"{path} is damaged: it is not the status of a rank ({reason}). Remove the file.") from None
    return dict(sorted(statuses.items()))


def _parsed(fields: dict[str, Any]) -> RankStatus:
    error, save, phase = fields.pop("error"), fields.pop("save"), fields.pop("phase", None)
    return RankStatus(
        **fields,
        error=RankError(**error) if error else None,
        save=SaveStatus(**save) if save else None,
        phase=PhaseStatus(**phase) if phase else None,
    )


def clear_statuses(run_dir: Path) -> None:
    for path in (run_dir / STATUS_DIR).glob("rank_*.json"):
        remove_file(path)


def dump_stacks_on_signal(path: Path) -> None:
    """Make SIGUSR2 append the stacks of all threads to `path`, even in a deadlock or while a thread holds the GIL."""
    faulthandler.register(STACKS_SIGNAL, file=path.open("w"), all_threads=True)


def stacks_file(run_dir: Path, rank: int) -> Path:
    """Return the file for a rank's stacks, which is empty until SIGUSR2."""
    return run_dir / STATUS_DIR / f"stacks_rank_{rank}.txt"


def rename_stacks(run_dir: Path) -> list[Path]:
    """Rename the stacks of the ranks, so that the next attempt does not delete them. Return the new names."""
    kept, number = [], 1
    folder = run_dir / STATUS_DIR
    while any(folder.glob(f"hang_{number}_*")):
        number += 1
    for path in sorted(folder.glob("stacks_rank_*.txt")):
        if path.stat().st_size:
            kept.append(rename(path, folder / path.name.replace("stacks", f"hang_{number}")))
    return kept
