"""Watchdog: finds ranks that make no progress, from their events. Uses no processes, files or clocks.

A phase is the time from one event of the training loop to the next; the phase after `rollout.before` is the generation.
The deadline of a phase is a setting, or is learned from the longest time that any rank has spent in the phase.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.ranks.status import STARTING

LEARN_AFTER = 3
FACTOR = 5.0
SHORTEST_S = 300.0
# At most this much time counts between two looks. After a longer gap the supervisor was stopped (Ctrl-Z, a paused
# machine), and so were the ranks.
LONGEST_LOOK_S = 5.0
SAVES = ("commit.", "rollback.")
"""Events of saves and loads, whose deadline is `checkpoint.timeout_s`."""


@dataclass(frozen=True)
class Overdue:
    """A rank that has been in `phase` for `seconds`, which is longer than `deadline_s`.

    `origin` says where the deadline comes from: a setting, or how it was learned. With `save` the phase is one of the
    save that runs behind the rank's training loop.
    """

    rank: int
    phase: str
    seconds: float
    deadline_s: float
    origin: str
    save: bool


@dataclass
class _Place:
    event: str
    stamp: float
    since: float


class Watchdog:
    """Follows every rank through the phases of its training loop, and of a save that runs behind the loop.

    Learned deadlines are kept over restarts. All times are seconds of one monotonic clock, which the caller reads.
    """

    def __init__(self, trainer: TrainerConfig, save_timeout_s: float) -> None:
        self._trainer, self._save_timeout_s = trainer, save_timeout_s
        self._longest: dict[str, float] = {}
        self._seen: Counter[str] = Counter()
        self._loops: dict[int, _Place] = {}
        self._saves: dict[int, _Place] = {}
        self._watched = 0.0
        self._last_look: float | None = None

    def start(self, ranks: Collection[int]) -> None:
        """Begin a new attempt, in which `ranks` start now."""
        self._last_look = None
        self._loops = {rank: _Place(STARTING, 0.0, self._watched) for rank in ranks}
        self._saves = {}

    def observe(self, rank: int, event: str, stamp: float, now: float) -> None:
        """Record the newest event of a rank's loop.

        `stamp` is the rank's own time of the event, and distinguishes it from an earlier event of the same name.
        """
        self._advance(now)
        place = self._loops[rank]
        if (event, stamp) == (place.event, place.stamp):
            return
        self._seen[place.event] += 1
        self._longest[place.event] = max(self._longest.get(place.event, 0.0), self._watched - place.since)
        self._loops[rank] = _Place(event, stamp, self._watched)

    def observe_save(self, rank: int, event: str | None, stamp: float, now: float) -> None:
        """Record the newest event of the save behind a rank's loop; `event` is None if no save runs."""
        self._advance(now)
        place = self._saves.get(rank)
        if event is None:
            self._saves.pop(rank, None)
        elif place is None or (event, stamp) != (place.event, place.stamp):
            self._saves[rank] = _Place(event, stamp, self._watched)

    def overdue(self, now: float, alive: Collection[int], *, save: bool) -> tuple[list[Overdue], bool]:
        """Return the overdue phases, the one entered first at the head, and whether any rank is within its deadline.

        With `save` these are the phases of the saves, otherwise those of the loops. A rank that hangs makes the others
        wait until they are overdue as well. So there is a hang only if no rank is within its deadline: until then an
        overdue rank may wait for a peer whose phase is allowed to take longer.
        """
        self._advance(now)
        here = {rank: place for rank, place in (self._saves if save else self._loops).items() if rank in alive}
        found = [late for rank, place in here.items() if (late := self._late(rank, place, save=save))]
        return sorted(found, key=lambda late: here[late.rank].stamp), len(found) < len(here)

    def _advance(self, now: float) -> None:
        if self._last_look is not None:
            self._watched += min(now - self._last_look, LONGEST_LOOK_S)
        self._last_look = now

    def _late(self, rank: int, place: _Place, *, save: bool) -> Overdue | None:
        deadline_s, origin = self._deadline(place.event)
        seconds = self._watched - place.since
        return Overdue(rank, place.event, seconds, deadline_s, origin, save) if seconds > deadline_s else None

    def _deadline(self, event: str) -> tuple[float, str]:
        t = self._trainer
        if event.startswith(SAVES):
            return self._save_timeout_s, "checkpoint.timeout_s"
        if event != STARTING and t.watchdog_timeout_s is not None:
            return t.watchdog_timeout_s, "trainer.watchdog_timeout_s"
        if event == STARTING or self._seen[event] < LEARN_AFTER:
            return t.watchdog_first_timeout_s, "trainer.watchdog_first_timeout_s"
        longest = self._longest[event]
        return max(SHORTEST_S, FACTOR * longest), f"learned: it took {longest:.3g} s at most"
