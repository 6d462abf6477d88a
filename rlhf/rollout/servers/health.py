"""Health of a rollout server as a state machine: told what happens and when, it says what is due. No I/O, no clock."""

from collections import deque
from typing import Literal

from rlhf.config.schema.rollout import ServersConfig

State = Literal["starting", "serving", "stale", "dead"]
"""`stale`: alive, without the weights that are wanted. `dead`: not used until its back-off is over."""
Due = Literal["nothing", "start", "probe", "count", "push", "give_up"]

PROBE_EVERY_S = 1.0
"""While a server starts."""
WATCH_EVERY_S = 10.0
"""While it is idle; while requests wait at least four times within answer_timeout_s."""
REASONS_KEPT = 3


class Budget:
    """Failures of a fleet in a row, without a finished request between them.

    Those of times when nothing is asked of it do not count.
    """

    def __init__(self, max_failures: int) -> None:
        self.max_failures, self.in_a_row = max_failures, 0
        self.needed = False
        """Whether somebody waits for the fleet."""

    @property
    def spent(self) -> bool:
        return self.in_a_row > self.max_failures

    def failed(self) -> None:
        self.in_a_row += self.needed

    def finished(self) -> None:
        self.in_a_row = 0


class ServerHealth:
    """One server. `ours`: we start it and can start it again; otherwise it comes back by itself or not at all.

    The first failure in a row leaves a process of ours alone and asks it again after the back-off; after the next one,
    or when it is `gone` (ended, hung), it is started anew.
    """

    def __init__(self, settings: ServersConfig, budget: Budget, *, ours: bool, now: float) -> None:
        self.reasons: deque[str] = deque(maxlen=REASONS_KEPT)
        """Of its last failures."""
        self.failures = 0
        """In a row, without a finished request between them."""
        self.in_flight = 0
        """Requests it has not answered."""
        self._settings, self._budget, self._ours = settings, budget, ours
        self._wanted: str | None = None
        self._half_pushed = False
        self._start_due, self._retry_at = ours, now
        self._deadline = now + settings.start_timeout_s
        self._next_probe, self._next_count, self._last_progress = now, now, now
        self._tokens: float | None = None
        self._state: State = "dead" if ours else "starting"

    @property
    def state(self) -> State:
        return self._state

    def due(self, now: float) -> Due:
        """The action that is due from the owner now.

        `start`: end what still runs of it, start it, say `started`. `probe`: say `probing`, ask for its label. `count`:
        say `counting`, ask how many tokens it has computed, say `counted`. `push`: send it weights as soon as there are
        some. `give_up`: the budget is spent.
        """
        if self._budget.spent:
            return "give_up"
        if self._state == "dead":
            if now < self._retry_at:
                return "nothing"
            return "start" if self._start_due else "probe"
        if self.in_flight:
            return "count" if now >= self._next_count else "nothing"
        if now >= self._next_probe:
            return "probe"
        return "push" if self._state == "stale" else "nothing"

    def overdue(self, now: float) -> str | None:
        """The deadline that has passed, in words; the owner then says `failed(gone=True)`."""
        if self._state == "starting" and now >= self._deadline:
            return "did not get ready in time (rollout.servers.start_timeout_s, answer_timeout_s)"
        limit_s = self._settings.answer_timeout_s
        if self.in_flight and now - self._last_progress >= limit_s:
            return (
                f"hung: {self.in_flight} requests, and for {limit_s:g} s no answer and no token "
                "(rollout.servers.answer_timeout_s)"
            )
        return None

    def started(self, now: float) -> None:
        """Its process was started."""
        self._become_starting(now, self._settings.start_timeout_s)

    def probing(self, now: float) -> None:
        """A probe is under way."""
        if self._state == "dead":
            # A process of ours that still runs needs no time to start.
            s = self._settings
            self._become_starting(now, s.answer_timeout_s if self._ours else s.start_timeout_s)
        self._next_probe = now + (PROBE_EVERY_S if self._state == "starting" else WATCH_EVERY_S)

    def probed(self, now: float, label: str) -> None:
        """It is alive and says that its weights are `label`."""
        if self._state == "serving" and label != self._wanted:
            self.outdated(
                f"has the weights {label!r}, not {self._wanted!r}: it was restarted, or somebody else uses it"
            )
        elif self._state in ("starting", "stale"):
            # After half a push it may be paused, whatever its label says.
            current = self._wanted is not None and label == self._wanted and not self._half_pushed
            self._become("serving" if current else "stale", now)

    def counting(self, now: float) -> None:
        """It is being asked for its count of tokens."""
        self._next_count = now + min(WATCH_EVERY_S, self._settings.answer_timeout_s / 4)

    def counted(self, now: float, tokens: float) -> None:
        """It has computed so many tokens in its life; another number than before is progress, however slow."""
        if self._tokens is not None and tokens != self._tokens:
            self._last_progress = now
        self._tokens = tokens

    def want(self, label: str) -> None:
        """From now on the weights `label` are wanted; requests to other ones count as dropped."""
        if label != self._wanted and self._state == "serving":
            self._state, self.in_flight = "stale", 0
        self._wanted = label

    def pushed(self, now: float, label: str, error: str | None) -> None:
        """Weights were sent, or not: then why."""
        self._half_pushed = error is not None
        if self._state != "stale":
            return
        if error is not None:
            self.failed(now, error)
        elif label == self._wanted:
            self._become("serving", now)

    def asked(self, now: float) -> None:
        """It was sent a request."""
        if not self.in_flight:
            # The first count is what the next one is compared with.
            self._last_progress = self._next_count = now
        self.in_flight += 1

    def finished(self, now: float) -> None:
        """It has answered a request well."""
        self.in_flight -= 1
        self._last_progress, self.failures = now, 0
        self._budget.finished()

    def outdated(self, reason: str) -> None:
        """It serves with other weights than it should; its requests count as dropped."""
        self._count(reason)
        self._state = "stale"

    def failed(self, now: float, reason: str, *, gone: bool = False) -> None:
        """It did something wrong; its requests count as dropped. `gone`: only a new process can help."""
        self._count(reason)
        self._state = "dead"
        self._retry_at = now + self.backoff_s
        self._start_due = self._ours and (gone or self._start_due or self.failures > 1)

    def ended(self) -> None:
        """Its process is no more, which explains the failure before."""
        self._start_due = self._ours

    @property
    def backoff_s(self) -> float:
        """The wait after the last failure."""
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
        self._state = "starting"

    def _become(self, state: State, now: float) -> None:
        self._state, self._next_probe = state, now + WATCH_EVERY_S
