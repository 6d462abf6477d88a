"""Derives the alerts of a run from its events and its verdict."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf.ranks.run_events import KILLED, RunEvent, with_kills
from rlhf.tracking.verdict import RunVerdict


@dataclass(frozen=True)
class Alert:
    """One alert. A run sends each `kind` and `cause` once in its life, however often it restarts."""

    kind: str
    cause: str
    text: str
    """The cause with its figures, for users."""
    step: int | None


def alerts_of_events(
    events: Sequence[RunEvent], last_step: int, *, ended: bool = False, changes: str = ""
) -> Iterator[Alert]:
    """Yield an alert for each crash, failure and kill since alerts were enabled, and for the end of a finished run.

    Args:
        last_step: the newest recorded step.
        ended: whether the command has ended. An end without an event counts as a kill.
        changes: the result of `changes_to_continue`.
    """
    starts = (i for i, event in enumerate(events) if event.kind == "started" and event.facts.get("alerts"))
    first = next(starts, len(events))
    for event in with_kills(events[first:], killed_now=ended):
        if event.kind in ("crashed", "failed"):
            yield Alert("crashed", f"{event.cause} ({event.kind}, step {event.step})", _crash(event), event.step)
        elif event.kind == KILLED:
            text = f"{event.cause.partition(';')[0]}. The same command{changes} continues the run."
            yield Alert("crashed", f"killed after {event.time}", text, last_step)
        elif event.kind == "finished":
            yield Alert("finished", f"step {last_step}", f"The run is finished at step {last_step}.", last_step)


def _crash(event: RunEvent) -> str:
    restart = event.facts.get("restart")
    end = f"Restart {restart} of {event.facts.get('max_restarts')}." if restart else "The run has ended."
    return f"{event.cause.rstrip('.')}. {end}"


def alert_of_verdict(verdict: RunVerdict, step: int) -> Alert | None:
    """Return the alert of a run that does not learn or is unstable; None for all other verdicts."""
    kinds = {"stuck": "stuck", "learned nothing": "stuck", "unstable": "unstable"}
    kind = kinds.get(verdict.kind)
    return None if kind is None else Alert(kind, verdict.cause, verdict.text, step)
