"""Finds hangs: passes the ranks' statuses to the watchdog, and collects stacks if ranks are overdue."""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.launch.evidence import Hang
from rlhf.launch.interface import Stacks, WatchedRanks
from rlhf.launch.watchdog import Overdue, Watchdog
from rlhf.ranks.status import RankStatus

LOOK_EVERY_S = 0.5
# Maximum number of frames to log: for the rank that hangs, and for each rank that waits for it.
_FRAMES, _FRAMES_OF_OTHERS = 12, 6


class OtherRanks(Protocol):
    """The hang detectors of the other nodes. Each detector sees the ranks of its node only."""

    def report(self, *, save: bool) -> None:
        """Report to the other nodes that a rank of this node is within its deadline.

        The deadline is that of the loop, or with `save` that of the background save.
        """

    def are_silent(self, *, save: bool) -> bool:
        """Return True if no other node has called `report` with this `save` recently, or if a node has found a hang."""


class HangDetector:
    """Finds hangs among the ranks of one attempt after another."""

    def __init__(self, trainer: TrainerConfig, save_timeout_s: float, others: OtherRanks | None = None) -> None:
        self._watchdog, self._others = Watchdog(trainer, save_timeout_s), others
        self._next_look = 0.0

    def start(self, ranks: Collection[int]) -> None:
        self._watchdog.start(ranks)

    def look(self, ranks: WatchedRanks, alive: Collection[int]) -> Hang | None:
        """Return the evidence of a hang among the ranks that are `alive`, or None.

        Calls within LOOK_EVERY_S seconds after a check return None at once. After a hang is found and the stacks of the
        ranks are collected, the ranks can only be killed.
        """
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_EVERY_S
        statuses = {rank: status for rank, status in ranks.statuses().items() if rank in alive}
        for rank, status in statuses.items():
            self._watchdog.observe(rank, status.event, status.time, now, status.step)
            save = status.save
            self._watchdog.observe_save(rank, save.event if save else None, save.time if save else 0.0, now)
        # Check loops and background saves separately: a moving loop must not hide a save that hangs.
        for behind in (False, True):
            overdue, moving = self._watchdog.overdue(now, alive, save=behind)
            if moving and self._others is not None:
                self._others.report(save=behind)
            elif overdue and not moving and (self._others is None or self._others.are_silent(save=behind)):
                return _investigate(overdue, ranks.stacks(alive), statuses)
        return None


def _investigate(overdue: list[Overdue], stacks: Stacks, statuses: Mapping[int, RankStatus]) -> Hang:
    frames = {late.rank: _frames(late, stacks, statuses.get(late.rank)) for late in overdue}
    # Blame a stopped process, or else a rank that works outside a collective, or else the first rank to fall behind.
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


def frames_of(dump: str, thread: int) -> list[str]:
    """Return a thread's frames in the newest dump of `faulthandler`, innermost first; empty without the thread."""
    blocks = re.findall(rf"hread 0x0*{thread:x}\b[^\n]*:\n((?:  [^\n]*\n?)*)", dump)
    return [line.strip() for line in blocks[-1].splitlines()] if blocks else []


def waits_for_peers(frames: Sequence[str]) -> bool:
    """Return whether a thread with these Python frames waits in a collective, so that another rank is to blame."""
    for frame in frames:
        if "/torch/distributed/" in frame or "/rlhf/ranks/" in frame:
            return True
        if "/torch/" not in frame:
            return False
    return False


def shown(frames: Sequence[str], count: int) -> list[str]:
    """Return at most `count` frames for the log: the innermost frame, then frames outside PyTorch, which has dozens."""
    return [frame for i, frame in enumerate(frames) if i == 0 or "/torch/" not in frame][:count]
