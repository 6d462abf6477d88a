"""Makes the calls of episodes, also while the engine generates other turns, and journals outcomes before their use."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from typing import Any

from rlhf.environments.sessions import Call, EnvironmentFailed, EnvironmentLate, EnvironmentPool, Session
from rlhf.errors import UserError
from rlhf.events import announce
from rlhf.experience.episode import Episode, Stage, new_part
from rlhf.experience.journal import Journal
from rlhf.rollout import Request, Sample

Outcome = dict[str, Any]
"""Outcome of an episode's calls in a round: the environment's `replies` and `state`, or its `failure`."""
AskedTurns = dict[tuple[int, int], tuple[Episode, int]]
"""Maps the `uid` and `sample` of a request to its episode and the length of the response before the turn."""
ANNOUNCE_S = 20.0
"""Seconds between the events while no call ends."""
WAIT_S = 0.05
"""Longest wait in seconds for further outcomes, before episodes use the outcomes that are there."""
PAUSE_S = 0.2
"""Seconds between two looks at turns and outcomes during a generation. Each look syncs the journal's file."""


class EpisodeCalls:
    """Makes the calls of a rank's episodes in the threads of the pool. An episode uses an outcome once it is journaled.

    `finish` makes calls until no episode needs one, `advance` for a limited time. During a generation in the ranks,
    `begin` and `use_done` make calls of complete turns. Such a call may be late because the engine needs the same
    processors, so `finish` repeats a call that took too long.
    """

    def __init__(self, pool: EnvironmentPool, journal: Journal | None) -> None:
        self._pool, self._journal = pool, journal
        self._begun: dict[Episode, Future[Outcome | None]] = {}
        self._late: set[Episode] = set()  # episodes whose calls `finish` repeats
        self._announced = time.monotonic()

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Make or look up all calls, until every episode needs the policy or is finished."""
        while any(episode.phase is Stage.CALLS for episode in episodes):
            self.advance(episodes, WAIT_S)

    def advance(self, episodes: Sequence[Episode], wait_s: float = 0.0, most: int | None = None) -> list[Episode]:
        """Begin the calls of `episodes`. Return the episodes that used an outcome.

        Wait at most `wait_s` seconds for all calls to end. Then let at most `most` episodes use the outcomes so far.
        """
        used = self.begin(episodes, early=False)
        if wait_s:
            wait(self._begun.values(), wait_s)
        if (done := self._done(most)) or used:
            announce("env.answered")
            self._record(done)
            announce("env.recorded")
            self._use(done)
            used += [*done, *self.begin([*done], early=False)]
            self._announced = time.monotonic()
        elif time.monotonic() > self._announced + ANNOUNCE_S:  # the calls may outlast the watchdog's deadline
            announce("env.wait")
            self._announced = time.monotonic()
        return used

    def begin(self, episodes: Sequence[Episode], *, early: bool) -> list[Episode]:
        """Begin the episodes' next calls. Use outcomes in the journal at once, and return their episodes."""
        known = []
        if not early:
            self._late.clear()
        for episode in episodes:
            while episode.phase is Stage.CALLS and episode not in self._begun and episode not in self._late:
                journal = self._journal
                outcome = None if journal is None else journal.calls(episode.key, episode.operation)
                if outcome is None:
                    job = partial(_outcome, episode.session, episode.calls, early=early)
                    self._begun[episode] = self._pool.submit(job)
                    continue
                known.append(episode)
                # An object that lives has made a call anew whose record was damaged. It lacks the calls of the records.
                episode.session.drop()
                if "failure" not in outcome:
                    episode.session.record(episode.calls, outcome["replies"], outcome["state"])
                self._use({episode: outcome})
        return known

    def use_done(self) -> None:
        """Journal the outcomes so far, let the episodes use them, and begin the calls that follow."""
        done = self._done()
        beside_the_loop(partial(self._record, done))
        self._use(done)
        self.begin([*done], early=True)

    def drop(self, episodes: Sequence[Episode]) -> None:
        """End the environments of the episodes, also those in the middle of a call."""
        running = {episode: call for episode, call in self._begun.items() if not call.cancel()}
        for episode in running:
            episode.session.give_up()
        wait(running.values())
        for episode in episodes:
            episode.session.drop()

    @property
    def ended(self) -> bool:
        """Whether a call has ended whose outcome no episode has used yet."""
        return any(call.done() for call in self._begun.values())

    def _done(self, most: int | None = None) -> dict[Episode, Outcome]:
        """Remove at most `most` calls that have ended, and return their outcomes."""
        all_ended = ((episode, call.result()) for episode, call in self._begun.items() if call.done())
        ended = list(islice(all_ended, most))
        for episode, outcome in ended:
            del self._begun[episode]
            if outcome is None:
                self._late.add(episode)
        return {episode: outcome for episode, outcome in ended if outcome is not None}

    def _record(self, done: dict[Episode, Outcome]) -> None:
        if self._journal is not None and done:
            self._journal.add_calls({(e.key, e.operation): outcome for e, outcome in done.items()})

    def _use(self, done: dict[Episode, Outcome]) -> None:
        calls = [(episode.key, episode.operation) for episode in done]
        for call, (episode, outcome) in zip(calls, done.items(), strict=True):
            failures = len(episode.failures)
            try:
                if "failure" in outcome:
                    episode.fail(outcome["failure"])
                else:
                    episode.take_replies(outcome["replies"])
            except UserError:
                # The same command must work once the environment is corrected.
                if self._journal is not None:
                    self._journal.forget_calls(calls)
                raise
            if len(episode.failures) > failures:
                episode.failed_calls.append(call)


def asked_turns(episodes: Sequence[Episode], requests: Sequence[Request]) -> AskedTurns:
    """Return the turns that `requests`, one of each episode, ask for."""
    return {(each.uid, each.sample): (episode, each.start) for episode, each in zip(episodes, requests, strict=True)}


def turns_of(samples: Sequence[Sample], asked: AskedTurns) -> dict[Episode, Sample]:
    """Return the turn that each sample adds to its episode, and remove these turns from `asked`.

    Ignore samples of other requests, and of turns that were removed before.
    """
    turns = {}
    for sample in samples:
        if (found := asked.pop((sample.uid, sample.sample), None)) is not None:
            episode, start = found
            turns[episode] = new_part(sample, start)
    return turns


class EarlyTurns:
    """Adds complete turns to their episodes, and begins their calls, while the engine generates the other turns.

    The calls' time then adds less to the round. A round's batch stays the same: it does not depend on early turns.
    """

    def __init__(self, asked: AskedTurns, calls: EpisodeCalls, journal: Journal | None) -> None:
        """`asked`: the turns of the round. `add` removes the turns that it adds to their episodes."""
        self._asked, self._calls, self._journal = asked, calls, journal
        self._new: list[Sample] = []
        self._next = 0.0

    def add(self, samples: Sequence[Sample]) -> None:
        """Record complete samples. At most every PAUSE_S seconds, use these turns and the replies so far."""
        self._new += samples
        if time.monotonic() < self._next:
            return
        new, self._new = self._new, []
        turns = turns_of(new, self._asked)
        if self._journal is not None and turns:
            beside_the_loop(partial(self._journal.add_turns, {episode.key: turn for episode, turn in turns.items()}))
        for episode, turn in turns.items():
            episode.take_turn(turn)
        self._calls.begin([*turns], early=True)
        self._calls.use_done()
        self._next = time.monotonic() + PAUSE_S


def beside_the_loop(action: Callable[[], None]) -> None:
    """Run `action` in another thread and wait for it.

    The watchdog treats an event in the loop's thread as the end of a phase. Events in the middle of a generation would
    make phases of any length, so the longest phase so far would not predict the next.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="early-turns") as thread:
        thread.submit(action).result()


def _outcome(session: Session, calls: Sequence[Call], *, early: bool) -> Outcome | None:
    """Make the calls and return their outcome, or None if an early call took too long.

    End the environment after an episode's last call or a failure.
    """
    try:
        replies = session.make(calls)
    except EnvironmentFailed as error:
        session.drop()
        return None if early and isinstance(error, EnvironmentLate) else {"failure": str(error)}
    if calls[0]["op"] == "reward":
        session.close()
    return {"replies": replies, "state": session.state}
