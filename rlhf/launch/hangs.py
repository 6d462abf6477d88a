"""Finds ranks that hang: feeds the watchdog with their statuses, and collects the evidence."""

import time
from collections.abc import Collection, Mapping

from rlhf.config.trainer import TrainerConfig
from rlhf.launch.evidence import Hang
from rlhf.launch.rank_group import RankGroup, Stacks
from rlhf.launch.stacks import frames_of, shown, waits_for_peers
from rlhf.launch.watchdog import Overdue, Watchdog
from rlhf.ranks.status import RankStatus

LOOK_EVERY_S = 0.5
# Of the rank that hangs, and of those that wait for it.
_FRAMES, _FRAMES_OF_OTHERS = 12, 6


class HangDetector:
    """Looks after the ranks of one attempt after the other."""

    def __init__(self, trainer: TrainerConfig, save_timeout_s: float) -> None:
        self._watchdog = Watchdog(trainer, save_timeout_s)
        self._next_look = 0.0

    def start(self, nproc: int) -> None:
        """An attempt with ranks 0 to `nproc` - 1 begins."""
        self._watchdog.start(range(nproc))

    def look(self, ranks: RankGroup, alive: Collection[int]) -> Hang | None:
        """Return the evidence of a hang among the ranks that are `alive`, or None; looks at most every LOOK_EVERY_S.

        The ranks of a hang are asked for their stacks, and can only be killed.
        """
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_EVERY_S
        statuses = {rank: status for rank, status in ranks.statuses().items() if rank in alive}
        for rank, status in statuses.items():
            self._watchdog.observe(rank, status.event, status.time, now)
            save = status.save
            self._watchdog.observe_save(rank, save.event if save else None, save.time if save else 0.0, now)
        overdue = self._watchdog.overdue(now, alive)
        return _investigate(overdue, ranks.stacks(alive), statuses) if overdue else None


def _investigate(overdue: list[Overdue], stacks: Stacks, statuses: Mapping[int, RankStatus]) -> Hang:
    frames = {late.rank: _frames(late, stacks, statuses.get(late.rank)) for late in overdue}
    # A stopped process first, then one at work of its own; the ranks wait for it since it fell behind.
    culprit = min(overdue, key=lambda late: (frames[late.rank] != [], waits_for_peers(frames[late.rank])))
    where = {
        rank: shown(found, _FRAMES if rank == culprit.rank else _FRAMES_OF_OTHERS) or [stacks.silent[rank]]
        for rank, found in frames.items()
    }
    return Hang(
        rank=culprit.rank,
        what=f"no progress for {culprit.seconds:.0f} s after {culprit.phase} "
        f"(deadline {culprit.deadline_s:g} s, {culprit.origin})",
        where=where,
        dumps=stacks.files,
    )


def _frames(late: Overdue, stacks: Stacks, status: RankStatus | None) -> list[str]:
    if status is None:
        return []
    thread = status.save.thread if late.save and status.save else status.thread
    return frames_of(stacks.texts.get(late.rank, ""), thread)
