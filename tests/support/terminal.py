"""A terminal for a command: a pseudo-terminal under pexpect, and pyte's screen of what it shows."""

import os
import sys
import time
from pathlib import Path

import pexpect
import pyte

ROOT = Path(__file__).resolve().parents[2]
ROWS = 100
"""So many that nothing of a test scrolls away."""


class Terminal:
    """`python *arguments` in a terminal of `columns`; as from a shell, the directory is not the checkout's."""

    def __init__(self, columns: int, folder: Path, *arguments: str | Path, **variables: str) -> None:
        # Workers of pytest-xdist have a width in their environment, which programs believe before the terminal's.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment = inherited | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"} | variables
        self._screen = pyte.Screen(columns, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        """All bytes that came."""
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
        """Take in what comes within so many seconds; False once all programs have left the terminal."""
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
        """Return when the screen shows `text`, wherever lines break."""
        end = time.monotonic() + seconds
        while not self.shows(text):
            assert self.read() or self.shows(text), f"it ended without {text!r}:\n{self.text}"
            assert time.monotonic() < end, f"no {text!r}:\n{self.text}"

    def shows(self, text: str) -> bool:
        """Whether `text` is on the screen, wherever lines break."""
        return "".join(text.split()) in "".join(self.text.split())

    def end(self, seconds: float = 120) -> int:
        """The exit code of the command, negative for a signal, once it has ended and all it said is on the screen."""
        end = time.monotonic() + seconds
        while self.read():
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
        self.process.wait()
        signal = self.process.signalstatus
        return -signal if signal is not None else int(self.process.exitstatus or 0)

    def resize(self, columns: int) -> None:
        """Give the terminal another width."""
        self._screen.resize(ROWS, columns)
        self.process.setwinsize(ROWS, columns)

    @property
    def lines(self) -> list[str]:
        """The lines of the screen up to the last that is not empty."""
        shown = [line.rstrip() for line in self._screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def bar(self) -> str:
        """The line above the cursor."""
        return self._screen.display[max(0, self._screen.cursor.y - 1)].rstrip()

    @property
    def is_left_in_order(self) -> bool:
        """Whether the cursor can be seen, and is at the beginning of an empty line, where a shell writes its prompt."""
        cursor = self._screen.cursor
        return not cursor.hidden and cursor.x == 0 and not self._screen.display[cursor.y].strip()
