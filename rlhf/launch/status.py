"""Where each rank is and what went wrong in it: `status/rank_R.json`, the evidence that a dead rank leaves behind."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

STATUS_DIR = "status"

_PAGE = 4096


@dataclass(frozen=True)
class RankError:
    """Why a rank ended: a `user` error needs a person, a `crash` a restart. `traceback` is the formatted text, or
    empty."""

    kind: Literal["user", "crash"]
    message: str
    traceback: str


@dataclass(frozen=True)
class RankStatus:
    """A rank's step, its newest event, the time of it (seconds since the epoch), and the error that ended it."""

    step: int | None
    event: str
    time: float
    error: RankError | None


class StatusWriter:
    """Keeps the status file of one rank, in place, in one page.

    An event costs about a microsecond (a rename costs a thousand of them on ext4), a kill can't tear a write within one
    page, and the page is the rank's from the start, so that the error of a full disk can be noted as well. Nothing is
    fsynced: when the power fails nobody asks which rank was first.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        path = run_dir / STATUS_DIR / f"rank_{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._step: int | None = None
        self._event = "start"
        new = path.with_suffix(".new")
        self._fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write(None)
        new.replace(path)

    def event(self, step: int | None, event: str) -> None:
        """Note that `event` happens now, in `step` (None before the first one is known)."""
        self._step, self._event = step, event
        self._write(None)

    def error(self, kind: Literal["user", "crash"], message: str, traceback: str = "") -> None:
        """Note why the rank is about to end; step and event stay those of the last `event`.

        What doesn't fit into the page is cut off: first the traceback's beginning, then the message's end.
        """
        while not self._write(RankError(kind, message, traceback)):
            if traceback:
                traceback = traceback[len(traceback) // 4 + 1 :]
            else:
                message = message[: len(message) * 3 // 4]

    def _write(self, error: RankError | None) -> bool:
        """Write if it fits into the page, and say whether it did."""
        record = json.dumps(asdict(RankStatus(self._step, self._event, time.time(), error))).encode()
        if len(record) > _PAGE:
            return False
        os.pwrite(self._fd, record.ljust(_PAGE), 0)
        return True


def read_statuses(run_dir: Path) -> dict[int, RankStatus]:
    """The statuses that the ranks have left, by rank."""
    statuses = {}
    for path in (run_dir / STATUS_DIR).glob("rank_*.json"):
        fields = json.loads(path.read_text())
        error = fields.pop("error")
        statuses[int(path.stem.removeprefix("rank_"))] = RankStatus(
            **fields, error=RankError(**error) if error else None
        )
    return dict(sorted(statuses.items()))


def clear_statuses(run_dir: Path) -> None:
    """Forget the evidence of an earlier attempt."""
    for path in (run_dir / STATUS_DIR).glob("rank_*.json"):
        path.unlink()
