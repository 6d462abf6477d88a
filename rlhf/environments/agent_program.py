"""Serves an agent as the environment of one episode. An agent is a user's program that calls the model.

The calls of the trainer are `start` (returns the history of the program's first request), `answer` (returns the
messages or tokens that the program adds after the policy's answer, or a `Fork` if the program rewrites its history, or
None if the program has ended), and `reward`.
"""

import json
import math
import os
import queue
import signal
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.environments.agent_start import ProgramStart
from rlhf.environments.chat_endpoint import CHAT, ChatEndpoint, PendingRequest
from rlhf.environments.chat_protocol import Conversation, Fork, Message, RejectedRequest, Start
from rlhf.environments.token_protocol import TokenHistory
from rlhf.storage.files import make_new_dir
from rlhf.typed_json import MOST_LEVELS, is_deep

_LONGEST_OUTPUT = 4000
"""Maximum number of characters of a program's output in an error message."""
_LONGEST_ROW = 100_000
"""Maximum number of characters in RLHF_ROW. Linux allows 128 KiB per variable."""
_LONGEST_REWARD = 1000
_NO_REWARD = (
    "the program wrote no reward. Write a number to the file RLHF_REWARD_FILE, or set reward.functions, which read the "
    "conversation"
)


class _FailedError(Exception):
    """The program failed; the text says how."""


class ServedAgent:
    """Runs the program of one episode in a folder of its own, with an endpoint of its own."""

    def __init__(self, program: ProgramStart, timeout_s: float, folder: Path) -> None:
        """`folder`: the program's new folder, not created yet. A restarted program must get the same path."""
        self._program, self._timeout_s, self._folder = program, timeout_s, folder
        self._events: queue.Queue[PendingRequest | None] = queue.Queue()
        self._path = ""
        """The path of the last request."""
        self._history: Conversation | TokenHistory
        self._pending: PendingRequest | None = None
        self._last: PendingRequest | None = None
        """The last answered request."""
        self._answers = 0
        self._pid: int | None = None
        self._code: int | None = None
        self._has_ended = threading.Event()
        self._endpoint: ChatEndpoint | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make one call and return `value`, or `error`. An agent has no `state`; a resume repeats its calls."""
        try:
            return {"value": getattr(self, f"_{request['op']}")(request), "state": None}
        except (_FailedError, RejectedRequest) as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        """Kill the program. The host then kills this process with all that it started, and removes the folder."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._kill()

    def _open(self, request: dict[str, Any]) -> None:
        """Store the seed. `_start`, which receives the row, starts the program."""
        self._seed = int(request["seed"])

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        self._vocabulary = int(request["vocabulary"])
        make_new_dir(self._folder)
        self._endpoint = ChatEndpoint(self._events)
        variables = {
            "OPENAI_BASE_URL": self._endpoint.url,
            "OPENAI_API_KEY": self._endpoint.key,
            "RLHF_ROW": _row_text(request["row"]),
            "RLHF_REWARD_FILE": str(self._folder / "reward"),
            "HOME": str(self._folder),
            "TMPDIR": str(self._folder),
            # The endpoint needs no proxy.
            **{name: f"{os.environ.get(name, '')},127.0.0.1".lstrip(",") for name in ("NO_PROXY", "no_proxy")},
        }
        pipe, output = os.pipe()
        try:
            self._pid = self._program.run(variables, self._folder, output, self._seed)
        finally:
            os.close(output)
        self._endpoint.start()  # after the fork of the program, which should not copy a running thread
        self._output = _Output(pipe)
        threading.Thread(target=self._wait, args=(self._pid,), daemon=True).start()
        first = self._next()
        if not isinstance(first, dict):
            raise _FailedError(self._ended("without a request to OPENAI_BASE_URL"))
        return first

    def _answer(self, request: dict[str, Any]) -> list[Message] | list[int] | Fork | None:
        assert self._pending is not None
        self._last, self._pending = self._pending, None
        self._answers += 1
        self._last.reply(self._history.answer(self._answers, self._last.body, request))
        new = self._next()
        return {"kept": 0} | new if isinstance(new, dict) else new  # another protocol than before begins a row

    def _reward(self, request: dict[str, Any]) -> float:
        """End the episode, wait for the end of the program, and return the reward that the program wrote.

        Without a reward, return 0, or raise _FailedError if a reward is `required`.
        """
        assert self._endpoint is not None
        self._endpoint.end()
        # The trainer waits at most `timeout_s` for this call, so leave half of the time for the reply.
        if not self._has_ended.wait(self._timeout_s / 2):
            self._kill()
        found = _number_in(self._folder)
        if found is None and request["required"]:
            raise _FailedError(_NO_REWARD)
        return found or 0.0

    def _next(self) -> list[Message] | list[int] | Start | Fork | None:
        """Wait for the program's next request. Return its new messages or tokens, its history, or None at the end."""
        # A client that has received no answer sends the same request again.
        while (event := self._events.get()) is not None and self._last and event.repeats(self._last):
            assert self._last.answer is not None
            event.reply(self._last.answer)
            if not event.lost:
                self._last = event  # once this answer is delivered, an equal request is a new one
        if event is None:
            if self._code:
                raise _FailedError(self._ended(f"with exit code {self._code}"))
            return None
        try:
            if event.overlaps:  # treated as a rewritten history, it would make rows depend on timing
                raise RejectedRequest("it came before the answer to another request. Send one request after the other")
            if event.path != self._path:
                self._history = Conversation() if event.path == CHAT else TokenHistory(self._vocabulary)
                self._path = event.path
            new = None if event.too_deep else self._history.take(event.body)
            if event.too_deep or is_deep(new):  # also the arguments of calls, which are texts in the body
                raise RejectedRequest(f"its JSON is nested more than {MOST_LEVELS} levels deep. Send flatter JSON")
        except RejectedRequest as error:
            event.reject(str(error))
            raise RejectedRequest(f"a request of the program was rejected: {error}") from error
        self._pending = event
        return new

    def _wait(self, pid: int) -> None:
        self._code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._has_ended.set()
        self._events.put(None)

    def _kill(self) -> None:
        if self._pid is not None and not self._has_ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _ended(self, how: str) -> str:
        output = self._output.end()
        return f"the program ended {how}" + (f":\n{output}" if output else " and printed nothing")


class _Output:
    """Reads a program's output and keeps its end."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._end = pipe, b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while data := os.read(self._pipe, 1 << 16):
            self._end = (self._end + data)[-_LONGEST_OUTPUT:]

    def end(self) -> str:
        """Return the last output of an ended program. Wait at most a second, as a child may keep the pipe open."""
        self._reader.join(1.0)
        return self._end.decode(errors="replace").strip()


def _row_text(row: dict[str, Any]) -> str:
    """Return the row as JSON, with texts for dates, decimals and bytes. Raise _FailedError if it is too long for a
    variable."""
    text = json.dumps(_without_constants(row), default=str)
    if len(text) > _LONGEST_ROW:
        raise _FailedError(
            f"the row has {len(text)} characters as JSON, and RLHF_ROW can have at most {_LONGEST_ROW}. Shorten or "
            "remove columns"
        )
    return text


def _without_constants(value: Any) -> Any:
    """Return the value with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _without_constants(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_constants(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number_in(folder: Path) -> float | None:
    """Return the number in the reward file; None if there is no file. Raise _FailedError for anything else."""
    try:
        # A program may have made a link, or a pipe that nobody writes.
        fd = os.open(folder / "reward", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _FailedError(f"RLHF_REWARD_FILE cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _FailedError("RLHF_REWARD_FILE is not a file")
        text = file.read(_LONGEST_REWARD).decode(errors="replace").strip()
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not math.isfinite(number):
        raise _FailedError(f"RLHF_REWARD_FILE contains {text[:80]!r}, not a finite number")
    return number
