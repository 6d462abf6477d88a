"""Finds ranks that make no progress, from their events. Uses no processes, files or clocks.

A phase is the time from one event of a rank to the next; the phase after `rollout.before` is the generation. The
deadline of a phase is a setting, or, after LEARN_AFTER steps with the phase, is learned from the longest time that any
rank has spent in the phase.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.ranks.status import STARTING

LEARN_AFTER = 3
FACTOR = 5.0
SHORTEST_S = 300.0
# Count at most this time between two calls. In a longer gap, the whole run was paused (Ctrl-Z, a suspended machine).
LONGEST_LOOK_S = 5.0
SAVES = ("commit.", "memory.", "rollback.")
"""Prefixes of the events of saves and loads, whose deadline is `checkpoint.timeout_s`."""


@dataclass(frozen=True)
class Overdue:
    """A rank that has been in `phase` for `seconds`, longer than `deadline_s`.

    `origin` is the source of the deadline: a setting, or the time from which it was learned. With `save` the phase
    belongs to a background save, otherwise to the training loop.
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
    step: int | None = None


class Watchdog:
    """Follows every rank through the phases of its training loop and of its background saves.

    Restarts keep the learned deadlines. All times are seconds of one monotonic clock, which the caller reads.
    """

    def __init__(self, trainer: TrainerConfig, save_timeout_s: float) -> None:
        self._trainer, self._save_timeout_s = trainer, save_timeout_s
        self._longest: dict[str, float] = {}
        # Count the steps with a phase per rank, because the first evaluation on eight ranks is one occurrence, not
        # eight. Within a step, a phase may be short several times and then long: three resets of environments took a
        # second each, and the watchdog killed the first generation of episodes after 300 s.
        self._steps: defaultdict[tuple[int, str], set[int | None]] = defaultdict(set)
        self._loops: dict[int, _Place] = {}
        self._saves: dict[int, _Place] = {}
        self._watched = 0.0
        self._last_look: float | None = None

    def start(self, ranks: Collection[int]) -> None:
        """Begin a new attempt of `ranks`."""
        self._last_look = None
        self._loops = {rank: _Place(STARTING, 0.0, self._watched) for rank in ranks}
        self._saves = {}

    def observe(self, rank: int, event: str, stamp: float, now: float, step: int | None) -> None:
        """Record the newest event of a rank's loop and its step (None before the first step is known).

        `stamp`, the rank's own time, distinguishes equal events.
        """
        self._advance(now)
        place = self._loops[rank]
        if (event, stamp) == (place.event, place.stamp):
            return
        if len(steps := self._steps[rank, place.event]) < LEARN_AFTER:
            steps.add(place.step)
        self._longest[place.event] = max(self._longest.get(place.event, 0.0), self._watched - place.since)
        self._loops[rank] = _Place(event, stamp, self._watched, step)

    def observe_save(self, rank: int, event: str | None, stamp: float, now: float) -> None:
        """Record the newest event of a rank's background save; `event` is None if no save runs."""
        self._advance(now)
        place = self._saves.get(rank)
        if event is None:
            self._saves.pop(rank, None)
        elif place is None or (event, stamp) != (place.event, place.stamp):
            self._saves[rank] = _Place(event, stamp, self._watched)

    def overdue(self, now: float, alive: Collection[int], *, save: bool) -> tuple[list[Overdue], bool]:
        """Return the overdue phases, oldest first, and whether any rank is within its deadline.

        With `save`, check the background saves, otherwise the loops. While any rank is within its deadline there is no
        hang, because an overdue rank may wait for a peer whose phase may take longer.
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
        deadline_s, origin = self._deadline(rank, place.event)
        seconds = self._watched - place.since
        return Overdue(rank, place.event, seconds, deadline_s, origin, save) if seconds > deadline_s else None

    def _deadline(self, rank: int, event: str) -> tuple[float, str]:
        t = self._trainer
        if event.startswith(SAVES):
            return self._save_timeout_s, "checkpoint.timeout_s"
        if event != STARTING and t.watchdog_timeout_s is not None:
            return t.watchdog_timeout_s, "trainer.watchdog_timeout_s"
        if event == STARTING or len(self._steps[rank, event]) < LEARN_AFTER:
            return t.watchdog_first_timeout_s, "trainer.watchdog_first_timeout_s"
        longest = self._longest[event]
        return max(SHORTEST_S, FACTOR * longest), f"learned: this phase took at most {longest:.3g} s"
