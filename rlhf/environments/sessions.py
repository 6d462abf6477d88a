"""Calls the environments of episodes, each call within a deadline, and restores environments that were lost."""

import contextlib
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlhf import typed_json
from rlhf.config.schema.env import EnvConfig
from rlhf.environments.chat_protocol import is_reply, is_start
from rlhf.environments.host_handle import Host, Process

MAX_REPLY_BYTES = 1 << 24
_TRIES = 3
"""Maximum number of attempts at a call if other calls end the shared process. The last attempt has its own process."""

T = TypeVar("T")
Call = dict[str, Any]
"""Operation `op` and its arguments, as JSON. Environments have reset, tool, step and reward.
Agents have start, answer and reward."""
Reply = dict[str, Any]
"""`value`, or `rejected`: the text with which a tool rejects a call."""


class EnvironmentFailed(Exception):
    """The environment raised, hung, died, or answered differently when its calls were repeated."""


class EnvironmentLate(EnvironmentFailed):
    """A call took longer than `env.timeout_s`."""


class _ProcessGoneError(Exception):
    """The process ended for a reason other than this session's call."""


@dataclass
class Session:
    """The environment of one episode. One thread at a time uses it.

    A process creates the environment's object when a call needs it. If the object is lost, because its process was
    killed or the trainer has restarted, the next call restores it from `state`. Without a state, the next call first
    repeats the calls in `made`, whose replies must be the same again (promise 20).
    """

    pool: "EnvironmentPool"
    kind: int
    """Index of the class in `env.classes`."""
    seed: int
    name: str = ""
    """Unique name from the episode's prompt, sample and number of retries; the same after a restart."""
    made: list[tuple[Call, Reply]] = field(default_factory=list)
    """All calls so far, with their replies."""
    state: dict[str, Any] | None = None
    """State after the last call in `made`; None if the object cannot save its state."""
    _channel: socket.socket | None = None
    _process: Process | None = None
    _given_up: bool = False

    def record(self, calls: Sequence[Call], replies: Sequence[Reply], state: dict[str, Any] | None) -> None:
        """Append calls and their replies, which may come from the journal. `state` is the state after these calls."""
        self.made += zip(calls, replies, strict=True)
        self.state = state

    def make(self, calls: Sequence[Call]) -> list[Reply]:
        """Make the calls in order and return their replies. Raise EnvironmentFailed if a call fails."""
        for attempt in range(_TRIES):
            try:
                # The last attempt has a process of its own: calls of other environments can end a shared process.
                self._restore(single=attempt + 1 == _TRIES)
                replies = [self._exchange(call) for call in calls]
            except (_ProcessGoneError, OSError) as error:
                self.drop()
                if self._given_up:
                    raise EnvironmentFailed("the trainer has given up the episode") from error
                if attempt + 1 == _TRIES:
                    raise EnvironmentFailed(f"the environment's process ended {_TRIES} times: {error}") from error
            else:
                self.record(calls, [_without_state(reply) for reply in replies], replies[-1]["state"])
                return [_without_state(reply) for reply in replies]
        raise AssertionError

    def _restore(self, *, single: bool) -> None:
        if self._channel is not None:
            return
        self._process = self.pool.process(single=single, name=self.name)
        self._channel = self._process.connect()
        self._exchange({"op": "open", "kind": self.kind, "seed": self.seed, "state": self.state})
        if self.state is not None:
            return
        for call, known in self.made:
            if _without_state(self._exchange(call)) != known:
                raise EnvironmentFailed(
                    "the program was started again to continue its episode, but sent other requests than before"
                    if self.pool.config.command is not None
                    else f"{call['op']} was repeated to restore an environment without state_dict, but returned "
                    "another result than before"
                )

    def _exchange(self, call: Call) -> Reply:
        """Send one request and return its reply, both before the deadline."""
        assert self._channel is not None
        assert self._process is not None
        if self._given_up:
            raise _ProcessGoneError
        # The reply must repeat a random number, so that code run by a tool cannot write the next reply in advance.
        number = secrets.token_hex(8)
        try:
            self._channel.settimeout(self.pool.config.timeout_s)
            self._channel.sendall(typed_json.dumps(call | {"number": number}).encode() + b"\n")
            reply = _read(self._channel, self.pool.config.timeout_s)
        except TimeoutError:
            if self._process.gone:
                raise _ProcessGoneError("another environment in the same process hung") from None
            self.pool.kill(self._process)
            self.drop()
            raise EnvironmentLate(
                f"{call['op']} took longer than env.timeout_s={self.pool.config.timeout_s:g}"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            if not self._given_up:
                self.pool.kill(self._process)
            raise _ProcessGoneError(str(error) or type(error).__name__) from error
        # Code that a tool runs may have read the number, so check the whole reply.
        try:
            if not isinstance(reply, dict) or reply.pop("number", None) != number or not _is_valid(call["op"], reply):
                raise ValueError
            if typed_json.is_deep(reply, typed_json.MOST_LEVELS + 10):  # the reply has its value some levels below
                raise ValueError
            reply = {name: value if name == "state" else _encodable(value) for name, value in reply.items()}
        except (ValueError, RecursionError):
            self.pool.kill(self._process)
            raise EnvironmentFailed(f"{call['op']} gave no valid reply") from None
        if "error" in reply:
            what = "" if self.pool.config.command is not None else f"{call['op']} raised an error:\n"
            raise EnvironmentFailed(what + reply["error"])
        return reply

    def close(self) -> None:
        """Close the environment, then `drop` the session, even if the environment fails to close."""
        if self._channel is not None:
            with contextlib.suppress(EnvironmentFailed, _ProcessGoneError, OSError):
                self._exchange({"op": "close"})
            self.drop()

    def give_up(self) -> None:
        """Let the call that runs in another thread fail at once. Once that thread is done, `drop` the session."""
        self._given_up, channel = True, self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Close the socket; the process closes the object."""
        channel, process, self._channel, self._process = self._channel, self._process, None, None
        if channel is not None:
            channel.close()
        if process is not None:
            self.pool.leave(process)


class EnvironmentPool:
    """Manages the processes of a rank's environments. Each call must return within `env.timeout_s` seconds."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self._host = Host(config)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(config.max_concurrent, thread_name_prefix="environment")
        self._shared: list[Process] = []

    def start(self) -> "EnvironmentPool":
        """Start the host; then `definitions` can be read. Raise UserError for a class that is not an environment."""
        self._host.start()
        return self

    @property
    def definitions(self) -> list[Any]:
        return self._host.definitions

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run the job in a thread, `env.max_concurrent` jobs at a time."""
        return self._threads.submit(job)

    def process(self, *, single: bool, name: str) -> Process:
        """Return a process for one more environment. `single`: the process serves no other environment."""
        if single or self.config.process == "episode" or self.config.command is not None:
            alone, folder = self.config.process == "episode", name if self.config.command is not None else ""
            return self._host.process(single=True, alone=alone, name=folder)
        with self._lock:
            self._shared = [process for process in self._shared if not process.gone]
            while len(self._shared) < self.config.num_workers:
                self._shared.append(self._host.process(single=False, alone=False))
            process = min(self._shared, key=lambda each: each.sessions)
            process.sessions += 1
            return process

    def leave(self, process: Process) -> None:
        """End a process that serves a single environment; otherwise count one environment less in the process."""
        if process.single:
            if not process.gone and self.config.command is not None:
                self._host.kill(process)  # also ends every process that the program started
            elif not process.gone:
                self._host.release(process)
            return
        with self._lock:
            process.sessions -= 1

    def kill(self, process: Process) -> None:
        if not process.gone:
            self._host.kill(process)

    def close(self) -> None:
        """End every process, even in the middle of a call."""
        self._host.close()
        self._threads.shutdown(cancel_futures=True)


def _without_state(reply: Reply) -> Reply:
    return {name: value for name, value in reply.items() if name != "state"}


def _is_valid(operation: str, reply: Reply) -> bool:
    """Return whether the reply has the values and types of the operation's result, or of an error or rejection."""
    if (text := reply.get("error", reply.get("rejected"))) is not None:
        return isinstance(text, str) and ("error" in reply or (operation == "tool" and _has_state(reply)))
    value, promised = reply.get("value"), "value" in reply and _has_state(reply)
    if operation in ("start", "answer"):
        return promised and (is_start(value) if operation == "start" else is_reply(value))
    if operation == "step":
        if not isinstance(value, list) or len(value) != 2:
            return False
        return promised and isinstance(value[0], str | None) and _is_number(value[1])
    if operation in ("tool", "reward"):
        return promised and (isinstance(value, str) if operation == "tool" else _is_number(value))
    return promised and isinstance(value, str | None)


def _has_state(reply: Reply) -> bool:
    return "state" in reply and isinstance(reply["state"], dict | None)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _encodable(value: Any) -> Any:
    """Return the value with each lone surrogate replaced by a question mark: no tokenizer accepts surrogates."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list) else value


def _read(channel: socket.socket, timeout_s: float) -> Reply:
    deadline, found = time.monotonic() + timeout_s, b""
    while not found.endswith(b"\n"):
        channel.settimeout(max(1e-3, deadline - time.monotonic()))
        data = channel.recv(1 << 16)
        if not data:
            raise ConnectionError("the process closed its socket")
        found += data
        if len(found) > MAX_REPLY_BYTES:
            raise ValueError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return json.loads(found)
