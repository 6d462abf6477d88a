"""Kills any process of a run's tree at random instants, in four ways.

The command is `python -m tests.faults.campaign --random`, which explains it.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from rlhf.errors import EXIT_DONE, EXIT_REQUEUE
from rlhf.events import LISTENER_VARIABLE
from tests.support.recovered import Updates

KINDS = ("SIGKILL", "SIGSTOP, SIGKILL", "SIGTERM", "all at once")
LONGEST_STOP_S = 1.0
OF_TRAINING, TRAINING_S = 0.7, 1.5
"""The share OF_TRAINING of the kills falls within TRAINING_S after the run trains again; other kills fall anywhere."""
ANY_S = 6.0
STUCK_S = 300.0
"""Seconds without an update and without an end after which a run is stuck."""
LATE_S = 30.0
"""Seconds after the end of a run within which its processes must end."""
ENDS = (EXIT_REQUEUE, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a killed command. SIGTERM ends an interpreter that has not loaded our code yet."""


@dataclass
class Figures:
    """Counts of one campaign: kills, starts and restarts."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of kills by kind and by the role of the killed process."""
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By kind, the seconds from a kill to the next update by a new process, if no other kill comes first."""
    runs: int = 0
    starts: int = 0
    restarts: int = 0

    def lines(self) -> Iterator[str]:
        """Return the report."""
        yield (
            f"random: {self.kills.total()} kills in {self.runs} run(s), {self.starts} starts of the command, "
            f"{self.restarts} restarts by the supervisor"
        )
        for kind in KINDS:
            roles = {role: n for (of_kind, role), n in sorted(self.kills.items()) if of_kind == kind}
            times = self.recoveries[kind]
            recovered = f"; next update after {median(times):.2f} s (median of {len(times)})" if times else ""
            by_role = ", ".join(f"{role} {n}" for role, n in roles.items())
            yield f"  {kind:17}{sum(roles.values()):5}  ({by_role}){recovered}"


class Stuck(Exception):
    """Raised for a run that neither trains nor ends."""


class DisturbedRun:
    """Runs `command` with the variables `environment`, kills it while `more()` returns true, and starts it again."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        rng: random.Random,
        figures: Figures,
        more: Callable[[], bool],
    ) -> None:
        self._command, self._rng, self._figures, self._more = command, rng, figures, more
        self._environment = environment
        self._log = folder / "killed.log"
        self._log.unlink(missing_ok=True)
        self._updates = Updates(folder / "updates")
        self._seen: dict[int, psutil.Process] = {}
        self._hits: list[tuple[str, float, frozenset[int]]] = []

    def run(self) -> list[str]:
        """Start the command until it ends with 0 or an unexpected exit code. Return the problems, one per line."""
        self._figures.runs += 1
        listener = {LISTENER_VARIABLE: "tests.support.recovered:on_event"} | self._updates.environment
        environment = os.environ | self._environment | listener
        code: int | None = None
        while code is None or code in ENDS:
            self._figures.starts += 1
            with self._log.open("a") as output:
                started = subprocess.Popen(self._command, env=environment, stdout=output, stderr=output)
            try:
                code = self._disturb(started)
            except Stuck as stuck:
                self._kill_all(psutil.Process(started.pid))
                return [f"{stuck}:\n{self._end_of_log()}"]
        self._note_figures()
        if code != EXIT_DONE:
            return [f"a start ended with exit code {code}:\n{self._end_of_log()}"]
        _, left = psutil.wait_procs(list(self._seen.values()), LATE_S)
        return [f"a process of the run is still there: {process}" for process in left]

    def _disturb(self, started: subprocess.Popen) -> int:
        """Kill processes at random instants until the command ends. Return its exit code."""
        while (code := self._until_the_moment(started)) is None:
            if (hit := self._kill_one(psutil.Process(started.pid))) is not None:
                kind, role = hit
                self._figures.kills[kind, role] += 1
                self._hits.append((kind, time.monotonic(), frozenset(self._seen)))
        return code

    def _until_the_moment(self, started: subprocess.Popen) -> int | None:
        """Wait until the next kill is due or the command ends. Return the exit code if it has ended."""
        last = max((at for _, at, _ in self._hits), default=float("-inf"))
        trains = self._rng.random() < OF_TRAINING
        moment = None if trains else time.monotonic() + self._rng.uniform(0.01, ANY_S)
        newest, stuck_at = self._updates.newest(), time.monotonic() + STUCK_S
        while (code := started.poll()) is None:
            now = time.monotonic()
            if (update := self._updates.newest()) > newest:
                newest, stuck_at = update, now + STUCK_S
            if moment is None and newest > last:
                moment = now + self._rng.uniform(0, TRAINING_S)
            if moment is not None and now > moment and self._more():
                return None
            if now > stuck_at:
                raise Stuck(f"neither an update nor an end for {STUCK_S:.0f} s")
            time.sleep(0.005)
        return code

    def _kill_one(self, supervisor: psutil.Process) -> tuple[str, str] | None:
        """Return kind and role of a kill that hit a running process."""
        roles = self._tree(supervisor)
        if not roles:
            return None
        kind, role = self._rng.choice(KINDS), self._rng.choice(sorted(roles))
        victim = self._rng.choice(roles[role])
        try:
            if kind == "all at once":
                self._kill_all(supervisor)
                return kind, "everyone"
            if kind == "SIGTERM":
                victim.terminate()
                return kind, role
            if kind != "SIGKILL":
                victim.suspend()
                time.sleep(self._rng.uniform(0, LONGEST_STOP_S))
            victim.kill()
        except psutil.NoSuchProcess:
            return None
        return kind, role

    def _kill_all(self, supervisor: psutil.Process) -> None:
        everyone = [process for of_role in self._tree(supervisor).values() for process in of_role]
        self._rng.shuffle(everyone)
        for process in everyone:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _tree(self, supervisor: psutil.Process) -> dict[str, list[psutil.Process]]:
        """Return the running processes by role."""
        roles: dict[str, list[psutil.Process]] = defaultdict(list)
        with suppress(psutil.NoSuchProcess):
            for process in [supervisor, *supervisor.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        roles[role_of(process, supervisor)].append(process)
                        self._seen[process.pid] = process
        return roles

    def _note_figures(self) -> None:
        self._figures.restarts += self._log.read_text().count("Restart ")
        for (kind, at, before), (_, following, _) in pairwise([*self._hits, ("", float("inf"), frozenset())]):
            if (update := self._updates.first(at, following, before)) is not None:
                self._figures.recoveries[kind].append(update - at)

    def _end_of_log(self) -> str:
        return self._log.read_text()[-3000:]


def role_of(process: psutil.Process, supervisor: psutil.Process) -> str:
    """Return the role of a process of the tree."""
    if process == supervisor:
        return "supervisor"
    words = " ".join(process.cmdline())
    if "rlhf.ranks.launcher" in words:
        return "launcher" if process.ppid() == supervisor.pid else "rank"
    known = {"rlhf.worker": "rank", "rlhf.reward": "reward process", "rlhf.rollout": "server", "VLLM": "server"}
    return next((role for word, role in known.items() if word in words), "other")
