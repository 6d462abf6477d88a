"""Shows users the progress of a run: a line every few seconds, and a bar that fits the terminal."""

import math
import time
from collections.abc import Callable, Iterator, Mapping

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.segment import Segment

from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.tracking.headline import ACCURACY, REWARD

LINE_INTERVAL_S = 5.0
"""Shortest time between two lines of steps."""
PHASE_INTERVAL_S = 15.0
"""Shortest time between two lines of phases after the first step."""
# Steps over which the ETA averages.
RATE_WINDOW = 20
SHOWN = (
    ("reward/mean", "reward", ".3f"),
    *((each.metric, each.label, each.format) for each in (ACCURACY, REWARD)),
    ("perf/tokens_per_second", "tokens/s", ",.0f"),
)
"""Metrics to show, with labels and formats. A run has only one of the two evaluation metrics."""
EVALUATED = {ACCURACY.metric, REWARD.metric}
LONGEST_BAR, SHORTEST_BAR = 30, 10
_NEVER = -math.inf


class Progress(ProgressDisplay):
    """Tracks the state of a run as its ranks report it, passes lines to `write_line`, and renders as a bar (rich).

    Lines come at most every LINE_INTERVAL_S, except for the first step, the last step and evaluations. Before the first
    step each phase has a line when it begins; afterwards only long phases have lines.
    """

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line = write_line
        self._step, self._total = 0, 0
        self._metrics: dict[str, float] = {}
        self._times: list[tuple[float, int]] = []
        self._last_line, self._last_phase_line = _NEVER, _NEVER
        self._phase_step, self._phase, self._since, self._note = 0, "", time.monotonic(), ""
        self._of_ranks: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}
        self._counts: dict[int, tuple[int, int]] = {}
        self.ended = False
        """Whether the bar is final and needs no empty line below it."""

    @property
    def started(self) -> bool:
        """Whether the run has begun its steps."""
        return self._total > 0

    def start(self, step: int, total: int) -> None:
        """Begin at `step` finished steps of `total`: 0, the resume step, or the target of a rollback."""
        self._step, self._total = step, total
        self._times, self._metrics, self._last_line = [(time.monotonic(), step)], {}, _NEVER

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step; step 0 is the evaluation before training."""
        now = time.monotonic()
        # Drop the times of repeated steps, and the time of the evaluation before training.
        self._times = [*(entry for entry in self._times[-RATE_WINDOW:] if entry[1] < step), (now, step)]
        self._metrics |= metrics
        self._step = step
        first = self._last_line == _NEVER
        due = now - self._last_line >= LINE_INTERVAL_S
        if first or due or step >= self._total or not EVALUATED.isdisjoint(metrics):
            self._last_line = now if step > 0 else _NEVER
            parts = [self._where(step), *(_labelled(metrics, *each) for each in SHOWN), self._eta()]
            self._write_line("  ".join(part for part in parts if part))

    def phase(self, rank: int, step: int, name: str, done: int = 0, total: int = 0) -> None:
        """Show the phase of rank 0, and the counts of all ranks in that phase."""
        self._of_ranks.setdefault((step, name), {})[rank] = done, total
        if rank != 0:
            if (step, name) == (self._phase_step, self._phase):
                self._counts = dict(self._of_ranks[step, name])
            return
        self._phase_step = step
        begins = name != self._phase
        if begins:
            self._phase, self._since, self._note = name, time.monotonic(), ""
            self._of_ranks = {key: counts for key, counts in self._of_ranks.items() if key[0] >= step}
        self._counts = dict(self._of_ranks.get((step, name), {}))  # a copy: another thread draws it
        now = time.monotonic()
        starting = self._last_line == _NEVER and begins and ":" not in name
        if starting or now - max(self._last_line, self._last_phase_line) >= PHASE_INTERVAL_S:
            self._last_phase_line = now
            where = self._where(step) if self.started and step else ""
            self._write_line("  ".join(part for part in (where, self.phase_text) if part))

    def note(self, text: str) -> None:
        """Show `text`, the newest state of a line that a rank overwrites, such as a download's bar."""
        self._note = text
        if self._phase and (now := time.monotonic()) - max(self._last_line, self._last_phase_line) >= PHASE_INTERVAL_S:
            self._last_phase_line = now
            self._write_line(f"{self._phase}  {text}")

    @property
    def phase_text(self) -> str:
        """The phase's name with its counts over all ranks or its duration."""
        done, total = (sum(counts[i] for counts in self._counts.values()) for i in (0, 1))
        if total:
            return f"{self._phase} {done:,}/{total:,}"
        seconds = time.monotonic() - self._since
        return f"{self._phase} {duration(seconds)}" if self._phase and seconds >= 1 else self._phase

    def _where(self, step: int) -> str:
        return f"step {step:{len(str(self._total))}d}/{self._total}"

    def _eta(self) -> str:
        times = self._times
        if not times or not times[0][1] < self._step < self._total:
            return ""
        (began, first), (now, _) = times[0], times[-1]
        return f"ETA {duration((now - began) / (self._step - first) * (self._total - self._step))}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        """Render the bar and, below it, an empty line for the cursor. If this process dies, the shell writes there."""
        # Leave the last column free, because some terminals wrap a line that fills it.
        width = options.max_width - 1
        head = self._where(self._step) if self.started else ""
        parts = self._fitting(width - cell_len(head) - (SHORTEST_BAR + 1 if head else 0))
        text = "  ".join(parts)
        if head:
            room = width - cell_len(head) - 1 - (cell_len(text) + 2 if text else 0)
            bar = min(LONGEST_BAR, room)
            if bar >= SHORTEST_BAR:
                yield Segment(f"{head} ")
                yield from console.render(
                    ProgressBar(total=self._total, completed=self._step, width=bar), options.update(width=bar)
                )
                yield Segment(f"  {text}" if text else "")
            else:
                yield Segment(_cut(head, width))
        else:
            yield Segment(_cut(text, width))
        yield Segment.line()
        if not self.ended:
            yield Segment("")
            yield Segment.line()

    def _fitting(self, width: int) -> list[str]:
        """Return the parts that fit into `width` columns beside the bar, chosen by importance, in display order."""
        phase = self.phase_text
        with_note = f"{phase} {self._note}" if self._note else phase
        if not self.started:
            return [with_note]
        reward, accuracy, held_out, speed = (_labelled(self._metrics, *each) for each in SHOWN)
        shown = [phase, reward, accuracy or held_out, speed, self._eta()]
        if cell_len(with_note) + 2 <= width:
            shown[0] = with_note
        kept: set[int] = set()
        for i in (0, 1, 4, 2, 3):
            size = cell_len(shown[i]) + 2
            if shown[i] and size <= width:
                kept.add(i)
                width -= size
        return [shown[i] for i in sorted(kept)]


def _labelled(metrics: Mapping[str, float], name: str, label: str, spec: str) -> str:
    return f"{label} {format(metrics[name], spec)}" if name in metrics else ""


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width))


def duration(seconds: float) -> str:
    """Format seconds as 7s, 1m40s or 2h02m."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
