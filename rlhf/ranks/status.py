"""Status file of each rank, `status/rank_R.json`: where it is, and the evidence that a dead rank leaves behind."""

import faulthandler
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rlhf.storage.files import make_dir, remove_file, rename

STATUS_DIR = "status"
STARTING = "start"
"""The event of a rank that has announced none yet."""
STACKS_SIGNAL = signal.SIGUSR2
SAVE_BEGINS, SAVE_ENDS = "commit.before", "commit.after"
"""A save that runs behind the loop, in a thread of its own: what that thread announces first and last."""
SCORED = "reward.scored"
WAITS_FOR_SCORE = "reward.wait"
"""A sample is scored, or waited for with a deadline; announced by a thread that the loop waits for."""

_PAGE = 4096
# Of an event that comes again and again one in this time is enough to see that the rank moves.
_REPEAT_S = 0.1


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank: `user` needs a person, `crash` a restart; `unsaved`: it left as asked, or finished,
    but what it was to save is not saved. `traceback` is the formatted text, or empty."""

    kind: Literal["user", "crash", "unsaved"]
    message: str
    traceback: str


@dataclass(frozen=True)
class SaveStatus:
    """The newest event of the save behind the loop, its time, and the identity of the thread that saves."""

    event: str
    time: float
    thread: int


@dataclass(frozen=True)
class RankStatus:
    """A rank's step, the newest event of its loop, the time of it (seconds since the epoch), the error that ended it,
    the identity of the loop's thread, and the save that runs behind it, if one does."""

    step: int | None
    event: str
    time: float
    error: RankError | None
    thread: int = 0
    save: SaveStatus | None = None


class StatusWriter:
    """Keeps the status file of one rank, in place, in one page; SIGUSR2 adds its stacks, in a file beside it.

    Make it in the thread of the loop. An event costs about 20 microseconds (a rename takes a thousand on ext4), a kill
    can't tear a write within one page, and the page is the rank's from the start, so that the error of a full disk can
    be noted as well. Nothing is fsynced: when the power fails nobody asks which rank was first.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        path = run_dir / STATUS_DIR / f"rank_{rank}.json"
        make_dir(path.parent)
        answer_with_stacks(stacks_file(run_dir, rank))
        self._lock = threading.Lock()
        self._status = RankStatus(None, STARTING, time.time(), None, threading.get_ident())
        new = path.with_suffix(".new")
        self._fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write(self._status)
        rename(new, path)

    def event(self, step: int | None, event: str) -> None:
        """Note that `event` happens now, in `step` (None before the first one is known).

        Of other threads than the loop's only two kinds count. One that announces a save, from SAVE_BEGINS to SAVE_ENDS;
        its steps do not, because the loop goes on meanwhile. And one that announces SCORED or WAITS_FOR_SCORE: it shows
        that the loop's phase moves.
        """
        thread, now = threading.get_ident(), time.time()
        with self._lock:
            # A clock that is set back must not silence a rank until it has caught up: the watchdog would see a hang.
            repeats = 0 <= now - self._status.time < _REPEAT_S
            if thread == self._status.thread:
                if (step, event) == (self._status.step, self._status.event) and repeats:
                    return
                self._status = replace(self._status, step=step, event=event, time=now)
            elif event == SAVE_BEGINS or (self._status.save and self._status.save.thread == thread):
                save = None if event == SAVE_ENDS else SaveStatus(event, now, thread)
                self._status = replace(self._status, save=save)
            elif event in (SCORED, WAITS_FOR_SCORE) and not repeats:
                self._status = replace(self._status, time=now)
            else:
                return
            self._write(self._status)

    def error(self, kind: Literal["user", "crash", "unsaved"], message: str, traceback: str = "") -> None:
        """Note why the rank is about to end; step and event stay those of the last `event`.

        What doesn't fit into the page is cut off: first the traceback's beginning, then the message's end.
        """
        with self._lock:
            # Kept, because a save behind the loop may still announce something.
            self._status = replace(self._status, time=time.time(), error=RankError(kind, message, traceback))
            while not self._write(self._status):
                if traceback:
                    traceback = traceback[len(traceback) // 4 + 1 :]
                else:
                    message = message[: len(message) * 3 // 4]
                self._status = replace(self._status, error=RankError(kind, message, traceback))

    def _write(self, status: RankStatus) -> bool:
        """Write if it fits into the page, and say whether it did."""
        record = json.dumps(asdict(status)).encode()
        if len(record) > _PAGE:
            return False
        os.pwrite(self._fd, record.ljust(_PAGE), 0)
        return True


def read_statuses(run_dir: Path) -> dict[int, RankStatus]:
    """The statuses that the ranks have left, by rank; of live ranks one may be missing for a moment."""
    statuses = {}
    for path in (run_dir / STATUS_DIR).glob("rank_*.json"):
        try:
            fields = json.loads(path.read_text())
        except ValueError:  # torn: a write was under way
            continue
        error, save = fields.pop("error"), fields.pop("save")
        statuses[int(path.stem.removeprefix("rank_"))] = RankStatus(
            **fields, error=RankError(**error) if error else None, save=SaveStatus(**save) if save else None
        )
    return dict(sorted(statuses.items()))


def clear_statuses(run_dir: Path) -> None:
    """Forget the evidence of an earlier attempt."""
    for path in (run_dir / STATUS_DIR).glob("rank_*.json"):
        remove_file(path)


def answer_with_stacks(path: Path) -> None:
    """Let SIGUSR2 append the stacks of all threads of this process to `path`; a deadlock or a held GIL do not keep it
    from that."""
    faulthandler.register(STACKS_SIGNAL, file=path.open("w"), all_threads=True)


def stacks_file(run_dir: Path, rank: int) -> Path:
    """The file that a rank writes its stacks to when it is asked with SIGUSR2; empty until then."""
    return run_dir / STATUS_DIR / f"stacks_rank_{rank}.txt"


def keep_stacks(run_dir: Path) -> list[Path]:
    """Give the stacks that ranks have written names that the next attempt leaves alone; returns these."""
    kept, number = [], 1
    folder = run_dir / STATUS_DIR
    while any(folder.glob(f"hang_{number}_*")):
        number += 1
    for path in sorted(folder.glob("stacks_rank_*.txt")):
        if path.stat().st_size:
            kept.append(rename(path, folder / path.name.replace("stacks", f"hang_{number}")))
    return kept
