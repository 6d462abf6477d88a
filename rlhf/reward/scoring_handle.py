"""Controls one reward process: starts it at the first request, kills it at a missed deadline, and restarts it."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf import typed_json
from rlhf.config.schema.reward import RewardConfig
from rlhf.config.user_functions import check_unchanged, hash_at_start
from rlhf.errors import UserError
from rlhf.printable import printable_output
from rlhf.reward.confinement import Confinement
from rlhf.reward.environment import reward_environment
from rlhf.reward.request_format import RequestFormat
from rlhf.reward.scores import NUMBER, RewardError, RewardItem
from rlhf.reward.settings import SETTING
from rlhf.storage.files import remove_dir

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
MAX_REPLY_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 1 << 20
"""For each request, show at most this many bytes of the process' output."""
_NUMBERS = (float, int)
_KINDS: dict[str, tuple[type, ...]] = {"score": (float, int, type(None))}
_KINDS |= dict.fromkeys(("timed_out", "failed", "user", "limit"), (bool,))
_KINDS |= dict.fromkeys(("error", "traceback", "folder"), (str,))
_KINDS |= dict.fromkeys(("extra", "notes", "request_format"), (dict,))
_KINDS |= dict.fromkeys(("missing", "scores"), (list,))
"""Types of the fields of replies and their entries."""
_ERROR, _READY = {"error", "user", "limit", "traceback"}, {"folder", "missing"}
_ENTRIES = ({"score", "extra", "notes", "timed_out", "failed"}, _ERROR)
_REPLIES = ({"scores"}, _ERROR, _READY | {"request_format"}, _ERROR | _READY)
_missing_logged: set[str] = set()


class ProcessDiedError(Exception):
    """The process ended by itself, was `killed`, or sent an invalid reply."""

    def __init__(self, how: str, *, killed: bool = False):
        super().__init__(how)
        self.killed = killed


class ScoringProcess:
    """One confined reward process; used by one thread at a time."""

    def __init__(self, verifier: str, config: RewardConfig, captured: list[str] | None = None):
        """`captured`: for a start that is only a check; receives the output, and missing protections are not logged."""
        self._verifier = verifier
        self._config = config
        self._captured = captured
        self._popen: subprocess.Popen[bytes] | None = None
        self._hash = hash_at_start(SETTING, [verifier])
        self._unread = b""
        self._output_left = MAX_OUTPUT_BYTES
        self._folder: str | None = None
        self.stopped = False

    def start(self) -> RequestFormat:
        """Start the process unless it runs, and return how to send samples. Raises RewardError or UserError."""
        if self._popen is None:
            self._format = self._start()
        return self._format

    def request(self, items: Sequence[RewardItem]) -> list[dict[str, Any]]:
        """Return an entry for each item: the fields of a `Score`, or of an error (see `failure`).

        Each item may take `reward.timeout_s`. Kills the process before raising TimeoutError or ProcessDiedError. Raises
        RewardError or UserError if the process cannot start.
        """
        request_format = self.start()
        if self.stopped:
            self.kill()
            raise ProcessDiedError("closed")
        # The number is random, so that code in a response cannot write the reply to the next request in advance.
        number = secrets.token_hex(8)
        body = {NUMBER: number, "items": [request_format.fields(item) for item in items]}
        timeout_s = request_format.timeout_s(self._config.timeout_s, len(items))
        line = typed_json.dumps(body).encode() + b"\n"
        reply = self._exchange(line, timeout_s, number, len(items))
        return reply["scores"] if "scores" in reply else [reply] * len(items)

    def _start(self) -> RequestFormat:
        config = self._config
        writable = [str(Path(path).expanduser().absolute()) for path in config.writable]
        confinement = Confinement(config.memory_gb, config.network, writable)
        # -P: do not import from the working directory first, where a file could shadow a module of the trainer.
        command = [sys.executable, "-P", "-m", "rlhf.reward.scoring_process", self._verifier, str(os.getpid())]
        command += [json.dumps(dataclasses.asdict(confinement)), str(config.timeout_s)]
        # Start a new session: only the trainer gets Ctrl-C, and a kill reaches all processes that user code started.
        # The output goes to a pipe, because a process with the trainer's log open could truncate the log.
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=reward_environment(os.environ, config.pass_env),
            start_new_session=True,
            bufsize=0,
        )
        assert self._popen.stdin
        assert self._popen.stdout
        assert self._popen.stderr
        self._stdin, self._stdout, self._stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        for pipe in (self._stdin, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        if self.stopped:  # stopped before the process existed
            _kill_group(self._popen)
        self._unread = b""
        try:
            ready = self._exchange(json.dumps(config.kwargs).encode() + b"\n", START_TIMEOUT_S)
            self._folder = ready.get("folder")
            if wrong := failure(ready):
                raise wrong
            # Promise 13: a process that starts again must not score with a file that was edited meanwhile.
            check_unchanged(SETTING, [self._verifier], self._hash)
        except ProcessDiedError as error:
            # No sample caused this death, so `reward.on_error` does not apply.
            raise RewardError(f"The reward process for {self._verifier} died while it started ({error}).") from error
        except TimeoutError as error:
            raise RewardError(
                f"The reward process for {self._verifier} was not ready within {START_TIMEOUT_S:.0f} s."
            ) from error
        except (UserError, RewardError):
            self.kill()
            raise
        if self._captured is None:
            _report_missing(ready["missing"])
        return RequestFormat(**ready["request_format"])

    def _exchange(self, request: bytes, timeout_s: float, number: str | None = None, count: int = 1) -> dict[str, Any]:
        """Send `request` and read one reply line with `number`, for `count` samples, both before the deadline."""
        assert self._popen is not None
        to_child, from_child = self._stdin.fileno(), self._stdout.fileno()
        deadline = time.monotonic() + timeout_s
        self._output_left = MAX_OUTPUT_BYTES
        try:
            if request and self._has_unrequested_reply(from_child):
                raise ValueError
            while request:
                try:
                    request = request[os.write(to_child, request) :]
                except BlockingIOError:
                    self._wait(to_child, select.POLLOUT, deadline)
            while b"\n" not in self._unread:
                self._wait(from_child, select.POLLIN, deadline)
                data = os.read(from_child, 1 << 16)
                if not data:
                    raise BrokenPipeError
                self._unread += data
                if len(self._unread) > MAX_REPLY_BYTES * count:
                    raise ValueError
            line, self._unread = self._unread.split(b"\n", 1)
            return _parsed(line, number, count)
        except TimeoutError:
            self.kill()
            raise
        except (ValueError, RecursionError) as error:
            self.kill()
            raise ProcessDiedError("invalid reply") from error
        except BrokenPipeError as error:
            # The pipe closes slightly before the exit status is available.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(0.5)
            status = self.kill()
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise ProcessDiedError(how, killed=status == -signal.SIGKILL) from error

    def _has_unrequested_reply(self, from_child: int) -> bool:
        """Return whether the process wrote to its reply pipe before the request. Such output could pass for a reply."""
        poll = select.poll()
        poll.register(from_child, select.POLLIN)
        return bool(self._unread) or any(events & select.POLLIN for _, events in poll.poll(0))

    def _wait(self, fd: int, events: int, deadline: float) -> None:
        """Wait until `fd` is ready, and forward the process' output meanwhile. Raise TimeoutError after `deadline`."""
        output = self._stderr.fileno()
        poll = select.poll()
        poll.register(fd, events)
        poll.register(output, select.POLLIN)
        while ready := poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            found = [each for each, _ in ready]
            if output in found and not self._forward_output(output):
                poll.unregister(output)
            if fd in found:
                return
            if time.monotonic() > deadline:  # the output may be endless
                break
        raise TimeoutError

    def _forward_output(self, output: int) -> bool:
        """Print the process' output, up to the limit; return False at its end."""
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:
            return True
        text = printable_output(data[: self._output_left].decode(errors="replace"))
        if self._captured is None:
            sys.stderr.write(text)
        else:
            self._captured.append(text)
        if 0 < self._output_left < len(data):
            log.warning(
                "%s printed more than %d bytes in one request; the rest is left out.", self._verifier, MAX_OUTPUT_BYTES
            )
        self._output_left = max(0, self._output_left - len(data))
        return bool(data)

    def stop(self) -> None:
        """End the current request, from another thread, and reject later ones."""
        self.stopped = True
        if (popen := self._popen) is not None:
            _kill_group(popen)

    def kill(self) -> int:
        """End the process and everything it started, and remove its folder. Return its exit status."""
        if self._popen is None:
            return 0
        popen, self._popen = self._popen, None
        _kill_group(popen)
        status = popen.wait()
        # The last output may say why the process ended.
        poll = select.poll()
        poll.register(self._stderr, select.POLLIN)
        while self._output_left and poll.poll(0) and self._forward_output(self._stderr.fileno()):
            pass
        for pipe in (self._stdin, self._stdout, self._stderr):
            pipe.close()
        if self._folder is not None:
            remove_dir(Path(self._folder), ignore_errors=True)
            self._folder = None
        return status


def _kill_group(popen: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)


def _parsed(line: bytes, number: str | None, count: int) -> dict[str, Any]:
    """Parse a reply. Raise ValueError for a wrong shape or number: code in a response may have written the line."""
    reply = json.loads(line, parse_constant=_reject_constant)
    if type(reply) is not dict or reply.pop(NUMBER, None) != number:
        raise ValueError
    _check_shape(reply, _REPLIES)
    if "scores" in reply and len(reply["scores"]) != count:
        raise ValueError
    for entry in reply.get("scores", []):
        _check_shape(entry, _ENTRIES)
        numbers = [*entry.get("extra", {}).values(), entry.get("score") or 0.0]
        if any(type(number) not in _NUMBERS or not _is_finite(number) for number in numbers):
            raise ValueError
    return reply


def _check_shape(value: Any, shapes: tuple[set[str], ...]) -> None:
    if type(value) is not dict or value.keys() not in shapes:
        raise ValueError
    if any(type(part) not in _KINDS[key] for key, part in value.items()):
        raise ValueError


def _reject_constant(constant: str) -> Any:
    raise ValueError(constant)  # the constant is NaN or an infinity


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # the integer is beyond the range of float
        return False


def _report_missing(missing: list[str]) -> None:
    new = [what for what in missing if what not in _missing_logged]
    _missing_logged.update(new)
    if new:
        log.warning(
            "Reward processes may run code that the policy writes, and this machine cannot confine them fully. "
            "Missing: %s. docs/design/reward-isolation.md lists the consequences.",
            "; ".join(new),
        )


def failure(reply: dict[str, Any], sample: str = "") -> Exception | None:
    """Return the error in a reply or in one of its entries, with the sample in the message; None for a score."""
    if "error" not in reply:
        return None
    if reply["user"]:
        return UserError(f"{reply['error']}{sample}")
    return RewardError(f"The reward function raised an error.{sample}\n{reply['traceback']}")
