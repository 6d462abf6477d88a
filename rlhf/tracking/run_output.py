"""Output of a run for people: lines on the terminal, above a bar where that is one, and the run's log file."""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, ConsoleDimensions
from rich.live import Live
from rich.text import Text

from rlhf.config.redaction import Redaction
from rlhf.errors import UserError
from rlhf.printable import printable_output, with_colour
from rlhf.storage.log_file import LogFile
from rlhf.tracking import unread_output
from rlhf.tracking.progress import Progress
from rlhf.tracking.unread_output import PipeWriter, UnreadPipe, is_pipe

REFRESH_PER_SECOND = 4
_HELD_LINES = 10_000


class _Console(Console):
    """A terminal whose cursor is never hidden, so that no death of this process can leave it so, whose loss is an
    error like any other, and not the end of this process, and whose size is what the terminal itself says."""

    @property
    def size(self) -> ConsoleDimensions:
        # COLUMNS and LINES, which rich prefers, are as old as whoever exported them: every program that has imported
        # readline gives its children the size of its own beginning, and a bar of that width breaks into two lines.
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):  # no terminal, or a stream without a file
            columns, rows = 0, 0
        return ConsoleDimensions(columns, rows) if columns and rows else super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        raise AttributeError("A terminal's size is its own.")

    def show_cursor(self, show: bool = True) -> bool:
        return False

    def on_broken_pipe(self) -> None:
        raise


class RunOutput:
    """Everything that a run says, made harmless (`rlhf.printable`) and free of secrets.

    `mode` is `tracking.progress`. Lines are kept for the log file until `keep` opens it: before the run lock is held
    nothing may be written. A terminal that is gone, a pipe that nobody reads, or a full disk, ends no run. While
    entered.
    """

    def __init__(self, mode: str, redact: Redaction) -> None:
        self._redact = redact
        self._console = _Console(stderr=True, force_terminal=True if mode == "live" else None)
        shows_bar = self._console.is_terminal and not self._console.is_dumb_terminal
        self.progress = Progress(self._step_line)
        self._live: Live | None = None
        if mode == "live" or (mode == "auto" and shows_bar):
            self._live = Live(
                self.progress,
                console=self._console,
                refresh_per_second=REFRESH_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
            )
        self._pipes = PipeWriter()
        self._held: list[str] | None = []
        self._log: LogFile | None = None
        # Lines come from several threads. Again by the same one, for what becomes of the log itself.
        self._lock = threading.RLock()

    @property
    def has_bar(self) -> bool:
        """Whether a bar is shown, so that lines of steps are for the log file only."""
        return self._live is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end_bar()
        if error is not None:  # told on stderr by the command itself
            text = [str(error)] if isinstance(error, UserError) else traceback.format_exception(error)
            self._write([self._harmless("".join(text))])
        with self._lock:
            if self._log is not None:
                self._log.close()
                self._log = None

    def begin_bar(self) -> None:
        """Show the bar, if this is a terminal, up to `end_bar`."""
        if self._live is not None:
            self._live.start(refresh=True)

    def end_bar(self) -> None:
        """Leave the bar where it is, or take it away if the run has not come to its steps."""
        if (live := self._live) is not None:
            self.progress.ended = True
            live.transient = not self.progress.started
            with _surviving(sys.stderr):
                live.stop()
            self._live = None

    def keep(self, path: Path) -> None:
        """Append all lines to the log file `path` from now on, those so far included."""
        with self._lock:
            held, self._held = self._held or [], None
            try:
                self._log = LogFile(path)
            except OSError as error:
                self.line(f"There is no log of this start: {error}. The run goes on.")
            self._write(held)

    def line(self, text: str, stream: TextIO | None = None) -> None:
        """Say one or more whole lines, on `stream` (stderr unless given) and in the log."""
        text = self._harmless(text)
        self._show(text, stream)
        self._write([text])

    def only_log(self, text: str) -> None:
        """Add lines to the log that were said already."""
        self._write([self._harmless(text)])

    def note(self, text: str) -> None:
        """Show the newest state of a line that is written over and over."""
        self.progress.note(self._harmless(text))

    def _step_line(self, text: str) -> None:
        text = self._harmless(f"{time.strftime('%H:%M:%S')} {text}")
        if not self.has_bar:
            self._show(text, None)
        self._write([text])

    def _harmless(self, text: str) -> str:
        # In this order: a colour in the middle of a secret would hide it, and be taken away.
        return self._redact(printable_output(text))

    def _show(self, text: str, stream: TextIO | None) -> None:
        to = sys.stderr if stream is None else stream
        text = with_colour(text, to)
        with _surviving(to):
            if self._live is not None and (stream is None or to.isatty()):
                self._console.print(Text.from_ansi(text), soft_wrap=True)
            else:
                self._print(f"{text}\n".encode(to.encoding or "utf-8", "backslashreplace"), to)

    def _print(self, line: bytes, to: TextIO) -> None:
        fd = _number(to)
        if fd is None or not is_pipe(fd):
            to.write(line.decode(to.encoding or "utf-8"))
            to.flush()
            return
        try:
            self._pipes.write(fd, line)
        except UnreadPipe:
            waited = f"{unread_output.PATIENCE_S:g} s"
            self.only_log(
                f"Nobody has read the output of this command for {waited}: its lines are dropped until somebody does. "
                "This log has them. The run goes on."
            )

    def _write(self, texts: Iterable[str]) -> None:
        with self._lock:
            if self._held is not None:
                self._held += texts
                del self._held[:-_HELD_LINES]
            elif self._log is not None:
                try:
                    for text in texts:
                        self._log.write(f"{text.rstrip()}\n")
                except OSError as error:
                    log, self._log = self._log, None
                    log.close()
                    self.line(f"The log of the run is not written any more: {error}. The run goes on.")


class OutputHandler(logging.Handler):
    """Log handler that hands its lines to `output`."""

    def __init__(self, output: RunOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Say the record."""
        self._output.line(self.format(record))


def _number(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # a stream without a file
        return None


@contextmanager
def _surviving(stream: TextIO) -> Iterator[None]:
    """Go on without a stream that is gone, as by a hang-up or a pager that has ended."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
