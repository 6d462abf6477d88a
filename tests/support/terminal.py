"""Runs a command in a pseudo-terminal (pexpect) and renders its screen (pyte)."""

import os
import sys
import time
from pathlib import Path

import pexpect
import pyte

ROOT = Path(__file__).resolve().parents[2]
ROWS = 100
"""Enough rows that no test's output scrolls away."""


class Terminal:
    """Runs `python *arguments` in a terminal of `columns`, like a shell outside the checkout."""

    def __init__(self, columns: int, folder: Path, *arguments: str | Path, **variables: str) -> None:
        # Workers of pytest-xdist have COLUMNS set, which programs prefer to the terminal's width.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment = inherited | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"} | variables
        self._screen = pyte.Screen(columns, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        """All bytes received."""
        self.started = time.monotonic()
        self.process = pexpect.spawn(
            sys.executable,
            list(map(str, arguments)),
            cwd=str(folder),
            env=environment,
            dimensions=(ROWS, columns),
            timeout=120,
            echo=True,
        )

    def read(self, seconds: float = 0.05) -> bool:
        """Receive output for `seconds`. Return False once all programs have closed the terminal."""
        try:
            data = self.process.read_nonblocking(1 << 16, seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Wait until the screen shows `text`, ignoring line breaks."""
        end = time.monotonic() + seconds
        while not self.shows(text):
            assert self.read() or self.shows(text), f"it ended without {text!r}:\n{self.text}"
            assert time.monotonic() < end, f"no {text!r}:\n{self.text}"

    def shows(self, text: str) -> bool:
        """Return whether the screen shows `text`, ignoring line breaks."""
        return "".join(text.split()) in "".join(self.text.split())

    def end(self, seconds: float = 120) -> int:
        """Wait for the end and all output; return the exit code, negative for a signal."""
        end = time.monotonic() + seconds
        while self.read():
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
        self.process.wait()
        signal = self.process.signalstatus
        return -signal if signal is not None else int(self.process.exitstatus or 0)

    def resize(self, columns: int) -> None:
        """Set the terminal's width."""
        self._screen.resize(ROWS, columns)
        self.process.setwinsize(ROWS, columns)

    @property
    def lines(self) -> list[str]:
        """Return the screen's lines up to the last non-empty line."""
        shown = [line.rstrip() for line in self._screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def bar(self) -> str:
        """Return the line above the cursor."""
        return self._screen.display[max(0, self._screen.cursor.y - 1)].rstrip()

    @property
    def is_left_in_order(self) -> bool:
        """Return whether the cursor is visible at the start of an empty line, ready for a shell's prompt."""
        cursor = self._screen.cursor
        return not cursor.hidden and cursor.x == 0 and not self._screen.display[cursor.y].strip()
