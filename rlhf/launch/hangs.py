"""Finds ranks that hang: feeds the watchdog with their status files, and collects the evidence."""

import time
from collections.abc import Mapping

from rlhf.config import Config
from rlhf.launch.evidence import Hang
from rlhf.launch.stacks import ask_for_stacks, frames_of, shown, waits_for_peers, why_silent
from rlhf.launch.watchdog import Overdue, Watchdog
from rlhf.ranks.status import RankStatus, keep_stacks, read_statuses, stacks_file

LOOK_EVERY_S = 0.5
# Of the rank that hangs, and of those that wait for it.
_FRAMES, _FRAMES_OF_OTHERS = 12, 6


class HangDetector:
    """Looks after the ranks of one attempt after the other."""

    def __init__(self, config: Config) -> None:
        self._run_dir = config.run_dir
        self._watchdog = Watchdog(config.trainer, config.checkpoint.timeout_s)
        self._next_look = 0.0

    def start(self, nproc: int) -> None:
        """An attempt with ranks 0 to `nproc` - 1 begins."""
        self._watchdog.start(range(nproc))

    def look(self, processes: Mapping[int, int]) -> Hang | None:
        """Evidence of a hang among the live ranks (rank -> process id), or None while there is none; at most every
        LOOK_EVERY_S.

        The ranks of a hang are asked for their stacks, which takes up to three seconds, and can only be killed.
        """
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_EVERY_S
        statuses = {rank: status for rank, status in read_statuses(self._run_dir).items() if rank in processes}
        for rank, status in statuses.items():
            self._watchdog.observe(rank, status.event, status.time, now)
            save = status.save
            self._watchdog.observe_save(rank, save.event if save else None, save.time if save else 0.0, now)
        overdue = self._watchdog.overdue(now, processes)
        return self._investigate(overdue, processes, statuses) if overdue else None

    def _investigate(
        self, overdue: list[Overdue], processes: Mapping[int, int], statuses: Mapping[int, RankStatus]
    ) -> Hang:
        ask_for_stacks({process: stacks_file(self._run_dir, rank) for rank, process in processes.items()})
        stacks = {late.rank: self._frames(late, statuses.get(late.rank)) for late in overdue}
        # A stopped process first, then one at work of its own; the ranks wait for it since it fell behind.
        culprit = min(overdue, key=lambda late: (stacks[late.rank] != [], waits_for_peers(stacks[late.rank])))
        where = {
            rank: shown(frames, _FRAMES if rank == culprit.rank else _FRAMES_OF_OTHERS) or [why_silent(processes[rank])]
            for rank, frames in stacks.items()
        }
        return Hang(
            rank=culprit.rank,
            what=f"no progress for {culprit.seconds:.0f} s after {culprit.phase} "
            f"(deadline {culprit.deadline_s:g} s, {culprit.origin})",
            where=where,
            dumps=keep_stacks(self._run_dir),
        )

    def _frames(self, late: Overdue, status: RankStatus | None) -> list[str]:
        if status is None:
            return []
        path = stacks_file(self._run_dir, late.rank)
        thread = status.save.thread if late.save and status.save else status.thread
        return frames_of(path.read_text(errors="replace"), thread) if path.exists() else []
