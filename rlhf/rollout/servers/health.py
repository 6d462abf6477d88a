"""Tracks a rollout server's health as a state machine: events come in, due actions go out. No I/O, no clock."""

from collections import deque
from typing import Literal

from rlhf.config.schema.rollout import ServersConfig

State = Literal["starting", "serving", "stale", "dead"]
"""`stale`: alive, but its weights are not the wanted ones or not verified. `dead`: unused until the back-off ends."""
Due = Literal["nothing", "start", "probe", "count", "push", "give_up"]

PROBE_EVERY_S = 1.0  # interval in seconds between probes of a starting server
WATCH_EVERY_S = 10.0  # interval in seconds between probes of an idle server
COUNT_EVERY_S = 2.0  # longest interval in seconds between load reports of a busy server
REASONS_KEPT = 3


class Budget:
    """Counts a fleet's failures in a row, without a finished request between them, while a caller waits."""

    def __init__(self, max_failures: int) -> None:
        self.max_failures, self.in_a_row = max_failures, 0
        self.needed = False  # whether a caller waits for the fleet

    @property
    def spent(self) -> bool:
        return self.in_a_row > self.max_failures

    def failed(self) -> None:
        self.in_a_row += self.needed

    def finished(self) -> None:
        self.in_a_row = 0


class ServerHealth:
    """Health of one server. `ours`: this run starts and restarts the server; any other server must recover by itself.

    The caller reports events with methods such as `started` and `request_sent`, and runs the actions that `due` and
    `overdue` return. After a first failure, a server that this run started is probed again when its back-off has
    passed. After a second failure in a row, or if its process is `gone` (ended or hung), the server is restarted.
    """

    def __init__(self, settings: ServersConfig, budget: Budget, *, ours: bool, now: float) -> None:
        self.reasons: deque[str] = deque(maxlen=REASONS_KEPT)  # reasons of the last failures
        self.failures = 0  # failures in a row without a finished request between them
        self.in_flight = 0  # number of requests without an answer
        self._settings, self._budget, self._ours = settings, budget, ours
        self._wanted: str | None = None
        self._verified = False  # whether this trainer's last push to the server (or adoption of the server) succeeded
        self._start_due, self._retry_at = ours, now
        self._deadline = now + settings.start_timeout_s
        self._next_probe, self._next_count, self._last_progress = now, now, now
        self._tokens: float | None = None
        self.label = ""  # label of the server's weights; empty if not known
        self.state: State = "dead" if ours else "starting"

    def due(self, now: float) -> Due:
        """Return the action that is due.

        start: end the process if it still runs, start it, and call `started`.
        probe: call `probing`, and ask for the label. count: call `counting`, ask for the token count, call `counted`.
        push: send weights as soon as the caller has weights. give_up: the budget of failures is spent.
        """
        if self._budget.spent:
            return "give_up"
        if self.state == "dead":
            if now < self._retry_at:
                return "nothing"
            return "start" if self._start_due else "probe"
        if self.in_flight:
            return "count" if now >= self._next_count else "nothing"
        if now >= self._next_probe:
            return "probe"
        return "push" if self.state == "stale" else "nothing"

    def overdue(self, now: float) -> str | None:
        """Return a text about a missed deadline, or None. The caller then calls `failed(gone=True)`."""
        if self.state == "starting" and now >= self._deadline:
            return "did not get ready in time (rollout.servers.start_timeout_s, answer_timeout_s)"
        limit_s = self._settings.answer_timeout_s
        if self.in_flight and now - self._last_progress >= limit_s:
            return (
                f"hung: {self.in_flight} requests, and for {limit_s:g} s no answer and no token "
                "(rollout.servers.answer_timeout_s)"
            )
        return None

    def started(self, now: float) -> None:
        self._become_starting(now, self._settings.start_timeout_s)

    def probing(self, now: float) -> None:
        if self.state == "dead":
            # A dead server of this run is only probed while its process runs, so it needs no time to start.
            s = self._settings
            self._become_starting(now, s.answer_timeout_s if self._ours else s.start_timeout_s)
        self._next_probe = now + (PROBE_EVERY_S if self.state == "starting" else WATCH_EVERY_S)

    def probed(self, now: float, label: str) -> None:
        """Record that the server is alive with the weights `label`."""
        if self.state == "serving" and label != self._wanted:
            self.outdated(
                f"has the weights {label!r}, not {self._wanted!r}: it was restarted, or another trainer uses it"
            )
        elif self.state in ("starting", "stale"):
            # After an interrupted push, even one of an earlier trainer, the server may be paused, whatever its label.
            current = self._wanted is not None and label == self._wanted and self._verified
            self._become("serving" if current else "stale", now)
        self.label = label

    def counting(self, now: float) -> None:
        self._next_count = now + min(COUNT_EVERY_S, self._settings.answer_timeout_s / 4)

    def counted(self, now: float, tokens: float) -> None:
        """Record the server's token count; any change is progress, however slow."""
        if self._tokens is not None and tokens != self._tokens:
            self._last_progress = now
        self._tokens = tokens

    def expect_label(self, label: str) -> None:
        """Set the label of the wanted weights.

        A server that serves other weights becomes stale, and its requests count as dropped.
        """
        if label != self._wanted and self.state == "serving":
            self.state, self.in_flight = "stale", 0
        self._wanted = label

    def pushed(self, now: float, label: str, error: str | None) -> None:
        """Record a push. Without `error`, the server has the weights `label` and no request of an earlier trainer."""
        self._verified, self.label = error is None, label if error is None else ""
        if self.state != "stale":
            return
        if error is not None:
            self.failed(now, error)
        elif label == self._wanted:
            self._become("serving", now)

    def request_sent(self, now: float) -> None:
        if not self.in_flight:
            # Make a count due at once, because progress is the difference between two counts.
            self._last_progress = self._next_count = now
        self.in_flight += 1

    def request_finished(self, now: float) -> None:
        self.in_flight -= 1
        self._last_progress, self.failures = now, 0
        self._budget.finished()

    def request_recalled(self) -> None:
        self.in_flight -= 1

    def outdated(self, reason: str) -> None:
        """Record that the server uses weights other than the wanted weights; its requests count as dropped."""
        self._count(reason)
        self.state, self.label = "stale", ""

    def failed(self, now: float, reason: str, *, gone: bool = False) -> None:
        """Record a failure; requests count as dropped. `gone`: only a restart helps."""
        self._count(reason)
        self.state = "dead"
        self._retry_at = now + self.backoff_s
        self._start_due = self._ours and (gone or self._start_due or self.failures > 1)

    def ended(self) -> None:
        """Record that the process of a dead server has ended, so that `due` returns `start` and not `probe`."""
        self._start_due = self._ours

    @property
    def backoff_s(self) -> float:
        s = self._settings
        return min(s.backoff_max_s, s.backoff_s * 2 ** min(max(self.failures - 1, 0), 30))

    def _count(self, reason: str) -> None:
        self.reasons.append(reason)
        self.failures += 1
        self.in_flight = 0
        self._budget.failed()

    def _become_starting(self, now: float, timeout_s: float) -> None:
        self._start_due = False
        self._deadline, self._next_probe = now + timeout_s, now
        self.state = "starting"

    def _become(self, state: State, now: float) -> None:
        self.state, self._next_probe = state, now + WATCH_EVERY_S
