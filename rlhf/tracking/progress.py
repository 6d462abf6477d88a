"""Progress of the run on stderr: a live bar in a terminal, one log line every few seconds otherwise."""

import logging
import math
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from rlhf.tracking.headline import headline
from rlhf.tracking.sample_files import ROLLOUT, VALIDATION, ShownSample, as_text

logger = logging.getLogger(__name__)

PLAIN_INTERVAL_S = 5.0
# Steps that the remaining time is estimated from.
RATE_WINDOW = 20


class Progress:
    """Shows the steps of one run on stderr, as `mode` (`tracking.progress`) says. Other ranks than the driver use
    `Progress.silent()`.

    Plain lines come at most every PLAIN_INTERVAL_S, except for the first and the last step and for evaluations.
    """

    def __init__(self, mode: str, total_steps: int, log_samples: bool = False) -> None:
        console = Console(stderr=True)
        self._log_samples = log_samples
        self._total = total_steps
        self._bar: Bar | None = None
        self._silent = False
        self._shown: dict[str, float] = {}
        self._times: list[tuple[float, int]] = []
        self._last_line = -math.inf
        self._redirected: list[tuple[logging.StreamHandler, object]] = []
        if mode == "live" or (mode == "auto" and console.is_terminal):
            self._bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True, force_terminal=True),
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", total=total_steps, text="")

    @classmethod
    def silent(cls) -> "Progress":
        """A progress that shows nothing."""
        progress = cls("plain", 0)
        progress._silent = True
        return progress

    def start(self, step: int) -> None:
        """Begin at `step` finished steps: 0, the resume step, or while it runs an earlier one that the run goes back
        to."""
        self._times, self._shown, self._last_line = [(time.monotonic(), step)], {}, -math.inf
        if self._bar is None:
            return
        self._bar.update(self._task, completed=step, text="")
        if not self._bar.live.is_started:
            streams = (sys.stdout, sys.stderr)
            self._bar.start()
            # The bar has replaced the standard streams by ones that print above it; log handlers hold the old ones.
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                    self._redirected.append((handler, handler.setStream(sys.stderr)))

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show a finished step; step 0 is the evaluation before training."""
        if self._silent:
            return
        now = time.monotonic()
        # The evaluation before training is no measure of a step.
        self._times = [*(entry for entry in self._times[-RATE_WINDOW:] if entry[1] < step), (now, step)]
        self._shown |= metrics
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._text(self._shown, step))
            return
        first = self._last_line == -math.inf
        due = now - self._last_line >= PLAIN_INTERVAL_S
        if first or due or step >= self._total or headline(metrics).metric in metrics:
            self._last_line = now if step > 0 else -math.inf
            logger.info("step %*d/%d  %s", len(str(self._total)), step, self._total, self._text(metrics, step))

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Show the best and the worst of a step's rollouts and of its evaluation, where `trainer.log_samples` asks for
        them."""
        if self._silent or not self._log_samples:
            return
        for split in (ROLLOUT, VALIDATION):
            ranked = sorted((s for s in samples if s["split"] == split), key=lambda sample: sample["score"])
            for sample in ranked[-1:] + ranked[:1] if len(ranked) > 1 else ranked:
                logger.info("step %d, %s", step, as_text(sample))

    def message(self, text: str) -> None:
        """Show a line of text that is no step (a checkpoint, a warning to the person watching)."""
        if not self._silent:
            logger.info("%s", text)

    def close(self) -> None:
        """Give the terminal back; the bar stays where it is."""
        if self._bar is not None:
            self._bar.stop()
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()

    def _text(self, metrics: dict[str, float], step: int) -> str:
        shown = headline(metrics)
        parts = [
            f"{label} {format(metrics[name], spec)}"
            for name, label, spec in (
                ("reward/mean", "reward", ".3f"),
                (shown.metric, shown.label, shown.format),
                ("perf/tokens_per_second", "tokens/s", ",.0f"),
            )
            if name in metrics
        ]
        (began, first), (now, _) = self._times[0], self._times[-1]
        if first < step < self._total:
            parts.append(f"ETA {_duration((now - began) / (step - first) * (self._total - step))}")
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
