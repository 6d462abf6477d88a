"""Determines the state of a run from its files: running, hung, crashed, stopped, finished or not started.

Takes no lock and writes nothing, so that readers cannot harm the run.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import UserError
from rlhf.ranks.lock import RUN_LOCK, holder_is_alive, holder_is_paused
from rlhf.ranks.next_start import changes_to_continue
from rlhf.ranks.run_events import RunEvent, read_events
from rlhf.ranks.status import STATUS_DIR, RankStatus, read_statuses
from rlhf.storage.layout import EVENTS, HISTORY, MANIFEST, RESOLVED, RUN_LOG, scan, step_of
from rlhf.tracking.history import Record
from rlhf.tracking.report import REPORT
from rlhf.tracking.stored_values import stored_values

State = Literal["not started", "running", "hung", "crashed", "stopped", "finished"]
TAIL_BYTES = 1 << 20
WINDOW = 20
"""Number of newest steps whose mean time predicts the remaining time."""
FACTOR, SHORTEST_S = 5.0, 300.0
"""Without `trainer.watchdog_timeout_s`, a run counts as hung if it makes no progress for FACTOR times the duration of
its longest recent step, and at least SHORTEST_S seconds. The watchdog applies these numbers to each phase."""
_TIMES = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")


@dataclass(frozen=True)
class LiveState:
    """Present state of a run, for users."""

    state: State
    reason: str
    """Why the run is in this state, in one line; may be empty."""
    record: Record
    """The newest value of each metric; `step` is the last finished step. Empty before the first record."""
    total_steps: int | None
    phase: str
    """The phase of a running run, with counts over the ranks of this machine. Empty if the run is not running."""
    remaining_s: float | None
    checkpoint: tuple[int, float] | None
    """Step and age in seconds of the newest checkpoint."""
    restarts: int
    """Restarts after crashes, over all starts."""
    causes: tuple[str, ...]
    """The newest causes of crashes and ends, newest first."""

    @property
    def step(self) -> int:
        """Return the last finished step."""
        return int(self.record.get("step", 0))


def check_run_dir(run_dir: Path) -> None:
    """Raise UserError if `run_dir` is not a run directory."""
    if not (run_dir / RESOLVED).is_file():
        if not run_dir.is_dir():
            raise UserError(f"{run_dir}: there is no such folder. Correct the path.")
        remedy = " Give the folder of a run, PROJECT/EXPERIMENT below trainer.default_local_dir."
        for runs in ("*", "*/*"):
            if any(run_dir.glob(f"{runs}/{RESOLVED}")):
                remedy = f" Its runs are {run_dir}/{runs}/."
        if (run_dir.absolute().parent / RESOLVED).is_file():  # `run_dir` is a checkpoint of a run
            remedy = f" It is in the run directory {run_dir.parent}."
        raise UserError(f"{run_dir} is not a run directory: it has no {RESOLVED}.{remedy}")


@contextmanager
def damage_as_user_error(run_dir: Path, *files: str) -> Iterator[None]:
    """Raise UserError for the errors that damaged files of a run cause. `files` names the files that the context
    reads, except files whose reader raises a UserError itself."""
    try:
        yield
    except TimeoutError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError, OSError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{run_dir} cannot be read: {' or '.join(files)} is damaged ({type(error).__name__}: {error}). Restore the "
            "file from a copy."
        ) from None


def read_state(run_dir: Path) -> LiveState:
    """Return the state of a run, from the end of its history and the small files of its directory.

    Raises:
        UserError: `run_dir` is not a run directory, or its configuration or history is damaged.
    """
    check_run_dir(run_dir)
    with damage_as_user_error(run_dir, HISTORY, EVENTS, RESOLVED):
        return _read_state(run_dir)


def _read_state(run_dir: Path) -> LiveState:
    events, statuses = read_events(run_dir), read_statuses(run_dir)
    settings, records = stored_values(run_dir), _tail(run_dir / HISTORY)
    state, reason = _state(run_dir, events, statuses, settings, records)
    totals = (event.facts.get("total_steps") for event in reversed(events) if event.kind == "training")
    total = next(totals, settings.get("trainer.total_training_steps"))
    record: Record = {}
    for each in records:
        record |= each
    if wrong := [name for name, value in record.items() if not isinstance(value, int | float)]:
        raise TypeError(f"{wrong[0]} is not a number")
    restarts = sum(event.kind == "crashed" for event in events)
    now = time.time()
    checkpoint = next((path for path in scan(run_dir) if (path / MANIFEST).is_file()), None)
    newest = None
    if checkpoint is not None:
        newest = step_of(checkpoint) or 0, now - _changed(checkpoint / MANIFEST, now)
    found = LiveState(
        state=state,
        reason=reason,
        record=record,
        total_steps=total if isinstance(total, int) else None,
        phase=_phase(events, statuses) if state == "running" else "",
        remaining_s=None,
        checkpoint=newest,
        restarts=restarts,
        causes=tuple(event.cause for event in reversed(events) if event.cause)[:3],
    )
    return replace(found, remaining_s=_remaining(found, records))


def ended_state(run_dir: Path) -> tuple[State, str]:
    """Return the state and its reason without reading the history. Raise UserError for a damaged configuration."""
    return _state(run_dir, read_events(run_dir), read_statuses(run_dir), stored_values(run_dir), [])


def _state(
    run_dir: Path,
    events: list[RunEvent],
    statuses: dict[int, RankStatus],
    settings: dict[str, Any],
    records: list[Record],
) -> tuple[State, str]:
    last = next((event for event in reversed(events) if event.kind not in ("saved", "save failed")), None)
    if last is not None and last.kind in ("finished", "stopped", "failed"):
        ends: dict[str, State] = {"finished": "finished", "stopped": "stopped", "failed": "crashed"}
        return ends[last.kind], last.cause
    reported_at = _changed(run_dir / REPORT, -1.0)
    if last is None and reported_at >= _changed(run_dir / HISTORY, 0.0):  # the run's release wrote no events
        return "finished", ""
    alive = holder_is_alive(run_dir)
    if alive is False:
        if last is None and not (run_dir / HISTORY).exists():
            return "not started", ""
        present = {
            name: settings[key] for name in ("overwrite", "resume_mode") if (key := f"trainer.{name}") in settings
        }
        changes = changes_to_continue(TrainerConfig(**present))
        killed = "its command was killed, or the machine went down"
        return "crashed", f"{killed}; the same command{changes} continues the run"
    deadline_s = _deadline(settings, statuses, records)
    if alive and holder_is_paused(run_dir):
        return "hung", "its process is paused (Ctrl-Z or SIGSTOP); continue it with `fg` or SIGCONT"
    quiet_s = _quiet(run_dir, statuses, alive)
    if quiet_s > deadline_s:
        return "hung", f"no sign of progress for {quiet_s:,.0f} s (expected within {deadline_s:,.0f} s)"
    return "running", "" if alive else "on another machine"


def _deadline(settings: dict[str, Any], statuses: dict[int, RankStatus], records: list[Record]) -> float:
    fixed, first = settings.get("trainer.watchdog_timeout_s"), settings.get("trainer.watchdog_first_timeout_s")
    if not any(status.step is not None for status in statuses.values()) or not records:
        return float(first or 3600.0)
    longest = max((_seconds(record) for record in records), default=0.0)
    return float(fixed or max(SHORTEST_S, FACTOR * longest))


def _quiet(run_dir: Path, statuses: dict[int, RankStatus], alive: bool | None) -> float:
    """Return the seconds since the last sign of progress."""
    if alive and statuses:  # statuses have times of this machine's monotonic clock
        return time.monotonic() - max(status.time for status in statuses.values())
    now = time.time()
    files = [*(run_dir / name for name in (RUN_LOCK, EVENTS, HISTORY, RUN_LOG)), *(run_dir / STATUS_DIR).glob("*.json")]
    return now - max(_changed(path, 0.0) for path in files)


def _changed(path: Path, default: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed the file
        return default


def _phase(events: list[RunEvent], statuses: dict[int, RankStatus]) -> str:
    if not statuses:
        last = events[-1] if events else None
        if last is not None and last.kind == "crashed":
            return f"restart {last.facts.get('restart')} of {last.facts.get('max_restarts')}"
        return "starting"
    leader = statuses[min(statuses)]
    if leader.phase is None:
        return "starting the ranks"
    name = leader.phase.name
    same = [s.phase for s in statuses.values() if s.phase is not None and (s.step, s.phase.name) == (leader.step, name)]
    done, total = sum(phase.done for phase in same), sum(phase.total for phase in same)
    return f"{name} {done:,}/{total:,}" if total else name


def _seconds(record: Record) -> float:
    return sum(float(record.get(name, 0.0)) for name in _TIMES)


def _remaining(found: LiveState, records: list[Record]) -> float | None:
    """Return the expected seconds to the last step of a running run."""
    times = [_seconds(record) for record in records if record.get("step")][-WINDOW:]
    if found.state != "running" or found.total_steps is None or not times:
        return None
    return sum(times) / len(times) * max(0, found.total_steps - found.step)


def _tail(path: Path) -> list[Record]:
    """Return the records within the last TAIL_BYTES of a history; skip a torn last line."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            lines: deque[bytes] = deque(file.read().split(b"\n"))
    except FileNotFoundError:
        return []
    lines.pop()  # the last part is empty, or a line that is being written
    if start and lines:
        lines.popleft()
    return list(_parsed(path, lines))


def _parsed(path: Path, lines: Iterable[bytes]) -> Iterable[Record]:
    for line in lines:
        try:
            record = json.loads(line)
            record["step"] + 0
        except (ValueError, TypeError, LookupError):
            raise UserError(
                f"{path}: a line is damaged ({line[:60]!r}). Remove the line, or restore the file from a copy."
            ) from None
        yield record
