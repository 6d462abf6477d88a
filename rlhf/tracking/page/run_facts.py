"""Collects what the report shows about one run from its files, while the run trains or after its end."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.ranks.run_events import RunEvent, read_events, with_kills
from rlhf.storage.layout import EVENTS, HISTORY, SAMPLES
from rlhf.tracking.history import History, Record
from rlhf.tracking.live_state import LiveState, damage_as_user_error, read_state
from rlhf.tracking.page.curves import Curves
from rlhf.tracking.page.sample_choice import ShownSamples, choose_samples
from rlhf.tracking.report import summarize
from rlhf.tracking.stored_values import stored_values
from rlhf.tracking.verdict import Judge, RunVerdict

PHASES = {
    "gen": "generation",
    "update_weights": "weight sync",
    "reward": "rewards",
    "share": "moving samples between ranks",
    "ref": "log-probs of the reference",
    "old_log_prob": "log-probs before the update",
    "values": "values before the update",
    "adv": "advantages",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "testing": "evaluation",
    "save_checkpoint": "waiting for a save",
}
"""Names that users see for the metrics `timing_s/NAME`. All but the last two are parts of `timing_s/step`;
the weight sync before an evaluation is also a part of `testing`."""
_OUTSIDE = ("testing", "save_checkpoint")
_CHECK_EVERY = 500


class Deadline:
    """Raises TimeoutError once `seconds` have passed, so that a report cannot delay the end of a run for long."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def check(self) -> None:
        """Raise TimeoutError after the deadline."""
        if time.monotonic() > self._end:
            raise TimeoutError(f"the report takes longer than {self._seconds:g} s")


class PhaseTimes:
    """Sums the seconds of each phase over all steps, and counts how often each rank was the slowest of a step."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = 0.0
        self.slowest: Counter[int] = Counter()

    def add(self, record: Record) -> None:
        """Add a record."""
        for name in PHASES:
            self._seconds[name] += record.get(f"timing_s/{name}", 0.0)
        self._steps += record.get("timing_s/step", 0.0)
        if "perf/slowest_rank" in record:
            self.slowest[int(record["perf/slowest_rank"])] += 1

    def rows(self) -> list[tuple[str, float]]:
        """Return the phases with their seconds, the longest first, and the rest of the steps' time as `other`."""
        inside = sum(seconds for name, seconds in self._seconds.items() if name not in _OUTSIDE)
        found = [(PHASES[name], seconds) for name, seconds in self._seconds.items()]
        found.append(("other", max(0.0, self._steps - inside)))
        return sorted((row for row in found if row[1] > 0 and math.isfinite(row[1])), key=lambda row: -row[1])


@dataclass
class RunFacts:
    """Facts about one run that the report shows."""

    name: str
    run_dir: Path
    state: LiveState
    report: dict[str, Any]
    """The content of report.json."""
    verdict: RunVerdict
    events: list[RunEvent]
    settings: dict[str, Any]
    samples: ShownSamples
    curves: Curves = field(default_factory=Curves)
    phases: PhaseTimes = field(default_factory=PhaseTimes)


def read_facts(name: str, run_dir: Path, deadline: Deadline) -> RunFacts:
    """Return the facts of a run. Writes nothing and takes no lock.

    Raises:
        UserError: `run_dir` is not a run directory, or a file is damaged.
        TimeoutError: after the deadline.
    """
    state = read_state(run_dir)
    with damage_as_user_error(run_dir, HISTORY, EVENTS, SAMPLES):
        return _collected(name, run_dir, state, deadline)


def _collected(name: str, run_dir: Path, state: LiveState, deadline: Deadline) -> RunFacts:
    curves, phases, judge = Curves(), PhaseTimes(), Judge()
    for record in _checked(run_dir, deadline):
        curves.add(record)
        phases.add(record)
        judge.add(record)
    report = summarize(run_dir)
    deadline.check()
    return RunFacts(
        name=name,
        run_dir=run_dir,
        state=state,
        report=report,
        verdict=judge.verdict(report),
        events=with_kills(read_events(run_dir)),
        settings=stored_values(run_dir),
        samples=choose_samples(run_dir),
        curves=curves,
        phases=phases,
    )


def _checked(run_dir: Path, deadline: Deadline) -> Iterator[Record]:
    for number, record in enumerate(History(run_dir / HISTORY).records()):
        if number % _CHECK_EVERY == 0:
            deadline.check()
        yield record
