"""Writes a run's output for users: to the terminal, above the bar if there is one, and to the run's log file."""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
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
_MOST_EARLY_LINES = 10_000


class _Console(Console):
    """Reads the size from the terminal itself. Raises OSError if the terminal is lost. Never hides the cursor, because
    a killed process could not show it again."""

    @property
    def size(self) -> ConsoleDimensions:
        # rich prefers COLUMNS and LINES, which may be stale: a program that imported readline exports the size at its
        # own start, and a bar of a stale width breaks into two lines.
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):  # the stream is no terminal or has no file
            columns, rows = 0, 0
        return ConsoleDimensions(columns, rows) if columns and rows else super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        raise AttributeError("The size of a terminal cannot be set.")

    def show_cursor(self, show: bool = True) -> bool:
        return False

    def on_broken_pipe(self) -> None:
        raise


class RunOutput:
    """Writes all output of a run, without control characters (`rlhf.printable`) and without secrets.

    `mode` is `tracking.progress`. Lines wait in memory until `open_log`, because a process without the run lock must
    not write to the run directory. A lost terminal, an unread pipe or a full disk does not end the run.
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
        self._early_lines: list[str] | None = []
        self._log: LogFile | None = None
        # Several threads write lines. The lock is reentrant, because a failed write to the log writes another line.
        self._lock = threading.RLock()

    @property
    def has_bar(self) -> bool:
        """Whether there is a bar, so that step lines go to the log file only."""
        return self._live is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self.end_bar()
        if error is not None:  # write to the log only: the command prints the error to stderr
            text = [str(error)] if isinstance(error, UserError) else traceback.format_exception(error)
            self._write([self._sanitized("".join(text))])
        with self._lock:
            if self._log is not None:
                self._log.close()
                self._log = None

    def begin_bar(self) -> None:
        """Show the bar, if there is one, until `end_bar`."""
        if self._live is not None:
            self._live.start(refresh=True)

    def end_bar(self) -> None:
        """Stop the bar, and erase it if the run has not begun its steps."""
        if (live := self._live) is not None:
            self.progress.ended = True
            live.transient = not self.progress.started
            with _redirect_if_lost(sys.stderr):
                live.stop()
            self._live = None

    def open_log(self, path: Path) -> None:
        """Append all earlier and later lines to the log file `path`."""
        with self._lock:
            early, self._early_lines = self._early_lines or [], None
            try:
                self._log = LogFile(path)
            except OSError as error:
                self.line(f"The log file cannot be opened: {error}. The run continues without it.")
            self._write(early)

    def line(self, text: str, stream: TextIO | None = None) -> None:
        """Write one or more whole lines to `stream` (default: stderr) and to the log."""
        text = self._sanitized(text)
        self._show(text, stream)
        self._write([text])

    def only_log(self, text: str) -> None:
        """Write lines to the log only, because the terminal already shows them."""
        self._write([self._sanitized(text)])

    def note(self, text: str) -> None:
        """Show the newest state of a line that a rank overwrites."""
        self.progress.note(self._sanitized(text))

    def _step_line(self, text: str) -> None:
        text = self._sanitized(f"{time.strftime('%H:%M:%S')} {text}")
        if not self.has_bar:
            self._show(text, None)
        self._write([text])

    def _sanitized(self, text: str) -> str:
        # Strip before redacting: a colour code inside a secret would hide the secret from the redaction.
        return self._redact(printable_output(text))

    def _show(self, text: str, stream: TextIO | None) -> None:
        to = sys.stderr if stream is None else stream
        text = with_colour(text, to)
        with _redirect_if_lost(to):
            if self._live is not None and (stream is None or to.isatty()):
                self._console.print(Text.from_ansi(text), soft_wrap=True)
            else:
                self._print(f"{text}\n".encode(to.encoding or "utf-8", "backslashreplace"), to)

    def _print(self, line: bytes, to: TextIO) -> None:
        fd = _descriptor(to)
        if fd is None or not is_pipe(fd):
            to.write(line.decode(to.encoding or "utf-8"))
            to.flush()
            return
        try:
            self._pipes.write(fd, line)
        except UnreadPipe:
            waited = f"{unread_output.READER_TIMEOUT_S:g} s"
            self.only_log(
                f"The output of this command has not been read for {waited}. Lines are dropped until a reader reads "
                "again. The log file has all lines. The run continues."
            )

    def _write(self, texts: Iterable[str]) -> None:
        with self._lock:
            if self._early_lines is not None:
                self._early_lines += texts
                del self._early_lines[:-_MOST_EARLY_LINES]
            elif self._log is not None:
                try:
                    for text in texts:
                        self._log.write(f"{text.rstrip()}\n")
                except OSError as error:
                    log, self._log = self._log, None
                    log.close()
                    self.line(f"The log file can't be written and is closed: {error}. The run continues.")


class OutputHandler(logging.Handler):
    """Logging handler that writes to `output`."""

    def __init__(self, output: RunOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Write the formatted record."""
        self._output.line(self.format(record))


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # the stream has no file
        return None


@contextmanager
def _redirect_if_lost(stream: TextIO) -> Iterator[None]:
    """Redirect `stream` to /dev/null if it is lost, for example after a hang-up or the end of a pager."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
