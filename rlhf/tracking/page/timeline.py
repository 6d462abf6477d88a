"""Shows the events of a run: a drawing of the steps over time, and a table."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf.ranks.run_events import KILLED, RunEvent
from rlhf.tracking.page.curves import Points, sample_rows
from rlhf.tracking.page.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, plot
from rlhf.tracking.progress import duration

MOST_ROWS = 200
"""Maximum number of rows of the table. The table leaves out the oldest events."""
_SYMBOLS = {"crashed": "crash", "failed": "crash", KILLED: "crash", "stopped": "stop", "finished": "done"}


@dataclass(frozen=True)
class TimelineRow:
    """An event for users: local time, time since the first start, what happened, the step, the cause, the evidence."""

    clock: str
    after: str
    kind: str
    symbol: str
    step: str
    cause: str
    details: str


def rows(events: Sequence[RunEvent]) -> tuple[list[TimelineRow], int, str]:
    """Return the newest rows, the number of older events left out, and a sentence on the saves."""
    saves = [event for event in events if event.kind == "saved"]
    shown = [event for event in events if event.kind not in ("saved", "training")]
    first = events[0].time if events else 0.0
    return [_row(event, first) for event in shown[-MOST_ROWS:]], max(0, len(shown) - MOST_ROWS), _saves(saves)


def _row(event: RunEvent, first: float) -> TimelineRow:
    facts, kind = event.facts, event.kind
    cause = event.cause
    if kind == "crashed":
        kind = "hung" if facts.get("hang") else kind
        cause = f"{cause}; restart {facts.get('restart')} of {facts.get('max_restarts')}"
    elif kind == "started":
        cause = f"on {facts.get('host')}, release {facts.get('release')}"
    elif kind in ("resumed", "rolled back"):
        cause = f"{float(facts.get('bytes', 0)) / 2**20:,.1f} MiB in {float(facts.get('seconds', 0)):.2f} s"
    return TimelineRow(
        clock=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time)),
        after=duration(max(0.0, event.time - first)),
        kind=kind,
        symbol=_SYMBOLS.get(event.kind, ""),
        step="" if event.step is None else str(event.step),
        cause=cause,
        details=str(facts.get("details") or ""),
    )


def _saves(saves: Sequence[RunEvent]) -> str:
    if not saves:
        return "No checkpoint is recorded."
    seconds = statistics.median(float(save.facts.get("seconds", 0.0)) for save in saves)
    count = "1 checkpoint" if len(saves) == 1 else f"{len(saves):,} checkpoints"
    size = float(saves[-1].facts.get("bytes", 0)) / 2**20
    return f"Saved {count}, the last at step {saves[-1].step} ({size:,.1f} MiB); a save took {seconds:.2f} s (median)."


def drawing(events: Sequence[RunEvent]) -> Markup:
    """Return a drawing of the step over time. At each crash or kill, the curve falls back to the step loaded next."""
    first = events[0].time
    line: Points = [(event.time - first, event.step) for event in events if event.step is not None]
    if len(line) < 2 or line[0][0] == line[-1][0]:
        return Markup("")
    if len(line) > 2000:
        line = [line[i] for i in sample_rows([x for x, _ in line], 2000)]
    body = plot([Line("step", line)], "The step over the time since the first start", of_x=duration)
    low, high = line[0][0], line[-1][0]
    marks = []
    for event in events:
        if (symbol := _SYMBOLS.get(event.kind)) and low <= event.time - first <= high:
            at = round(LEFT + (event.time - first - low) / (high - low) * (WIDTH - RIGHT - LEFT), 1)
            title = f"{event.kind} {event.cause}"
            marks.append(
                Markup('<line class="mark {}" x1="{}" x2="{}" y1="{}" y2="{}"><title>{}</title></line>').format(
                    symbol, at, at, TOP, HEIGHT - BOTTOM, title
                )
            )
    return Markup(str(body).replace("</svg>", f"{Markup('').join(marks)}</svg>"))
