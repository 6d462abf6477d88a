"""Pool of reward processes, which can be killed at each sample's deadline: for verifiers that may hang or crash."""

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rlhf
from rlhf.config.reward import RewardConfig
from rlhf.errors import UserError
from rlhf.events import announce
from rlhf.reward.failures import FailurePolicy
from rlhf.reward.scores import RewardError, RewardItem, Score

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
SENT = ("data_source", "response", "ground_truth", "extra_info")
"""Fields of an item that its process gets; functions don't take the prompt's chat."""


class _Died(Exception):
    """The process ended by itself."""


class ScoringProcess:
    """One reward process: started when first asked, killed at a missed deadline, started again when asked again."""

    def __init__(self, verifier: str):
        self._verifier = verifier
        self._popen: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self.stopped = False

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply to one request. Raises TimeoutError, or _Died; the process is gone after either."""
        if self._popen is None:
            self._start()
        if self.stopped:
            self.kill()
            raise _Died("closed")
        return self._exchange(json.dumps(request, default=str).encode() + b"\n", timeout_s)

    def _start(self) -> None:
        root = str(Path(rlhf.__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        command = [sys.executable, "-m", "rlhf.reward.scoring_process", self._verifier, str(os.getpid())]
        # A session of its own: Ctrl-C is the trainer's to handle, and a kill reaches what the user's code started.
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True, bufsize=0
        )
        assert self._popen.stdin is not None
        os.set_blocking(self._popen.stdin.fileno(), False)
        self._unread = b""
        try:
            if wrong := _failure(self._exchange(b"", START_TIMEOUT_S)):
                raise wrong
        except _Died as error:
            # Not the sample's doing, so that no policy may forgive it.
            raise RewardError(f"The reward process for {self._verifier} died while it started ({error}).") from error
        except TimeoutError as error:
            raise RewardError(
                f"The reward process for {self._verifier} was not ready within {START_TIMEOUT_S:.0f} s."
            ) from error
        except (UserError, RewardError):
            self.kill()
            raise

    def _exchange(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Send `request` and read one line, both before the deadline."""
        assert self._popen is not None
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        to_child, from_child = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        try:
            while request:
                _wait(to_child, select.POLLOUT, deadline)
                request = request[os.write(to_child, request) :]
            while b"\n" not in self._unread:
                _wait(from_child, select.POLLIN, deadline)
                data = os.read(from_child, 1 << 16)
                if not data:
                    raise BrokenPipeError
                self._unread += data
        except TimeoutError:
            self.kill()
            raise
        except BrokenPipeError as error:
            # A closed pipe comes a moment before the exit status.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(0.5)
            status = self.kill()
            raise _Died(f"signal {-status}" if status < 0 else f"exit status {status}") from error
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def stop(self) -> None:
        """End the request under way, from another thread, and refuse later ones."""
        self.stopped = True
        if (popen := self._popen) is not None:
            _kill_group(popen)

    def kill(self) -> int:
        """End the process and everything it started; returns its exit status."""
        if self._popen is None:
            return 0
        popen, self._popen = self._popen, None
        _kill_group(popen)
        for pipe in (popen.stdin, popen.stdout):
            assert pipe is not None
            pipe.close()
        return popen.wait()


def _kill_group(popen: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)


def _wait(fd: int, events: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _failure(reply: dict[str, Any], sample: str = "") -> Exception | None:
    """What the process says went wrong, with the sample that it went wrong on."""
    if "error" not in reply:
        return None
    if reply["user"]:
        return UserError(f"{reply['error']}{sample}")
    return RewardError(f"The reward raised an error.{sample}\n{reply['traceback']}")


class ProcessPool:
    """Scores items in `num_workers` processes at once, each sample within `timeout_s`."""

    def __init__(self, verifier: str, config: RewardConfig, policy: FailurePolicy, *, forgive_deaths: bool = False):
        """`forgive_deaths`: a sample on which the process dies twice never ends the run."""
        self._verifier = verifier
        self._config = config
        self._policy = policy
        self._forgive_deaths = forgive_deaths
        # Threads as long-lived as the pool: Linux sends the death signal when the *thread* that started a child ends.
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="reward")
        self._idle: queue.LifoQueue[ScoringProcess] = queue.LifoQueue()
        self._processes = [ScoringProcess(verifier) for _ in range(config.num_workers)]
        for process in self._processes:
            self._idle.put(process)

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """One score for each item, in order.

        Unless the policy forgives it: RewardError if the function raises or dies twice on one item, UserError if it
        returns no number. Whatever the policy: either of them if the process cannot start.
        """
        scores = []
        for score in self._threads.map(self._score_one, items):
            scores.append(score)
            announce("reward.scored")
        return scores

    def _score_one(self, item: RewardItem) -> Score:
        process = self._idle.get()
        try:
            reply = self._ask(process, item)
        except TimeoutError:
            return self._policy.timed_out()
        except _Died as error:
            died = RewardError(f"{self._verifier}: the reward process died twice ({error}) on one sample: {item}")
            if process.stopped:
                raise died from error
            return self._policy.failed(died, forgive=self._forgive_deaths)
        finally:
            self._idle.put(process)
        wrong = _failure(reply, f"\nThe sample: {item}")
        return Score(**reply) if wrong is None else self._policy.failed(wrong)

    def _ask(self, process: ScoringProcess, item: RewardItem) -> dict[str, Any]:
        request = {name: getattr(item, name) for name in SENT}
        try:
            return process.ask(request, self._config.timeout_s)
        except _Died as error:
            if process.stopped:
                raise
            log.warning("A reward process died (%s); starting it again for the same sample.", error)
            return process.ask(request, self._config.timeout_s)

    def close(self) -> None:
        """End every process, in the middle of a sample if need be."""
        for process in self._processes:
            process.stop()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.kill()
