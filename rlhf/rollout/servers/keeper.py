"""Runs a run's rollout servers as children of one process, so that they outlive crashes of the ranks. Imports no torch.

The supervisor starts `python -m rlhf.rollout.servers.keeper FD` with a listening socket, and passes the socket's path
to the ranks in the variable `KEEPER`. The leader sends its calls to the keeper with `RemoteKeeper`. The kernel kills
the keeper with the supervisor, and the servers with the keeper. Without a supervisor (torchrun), the leader creates a
`Keeper` in its own process.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf.ranks.parent import KEEPER, PARENT_PID, die_with_parent
from rlhf.rollout.servers.weights.plugin import SCRATCH_NAME
from rlhf.storage.scratch import Scratch

_KILL_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 60.0
_CALLS = ("start", "find", "poll", "kill")

log = logging.getLogger(__name__)
# The kernel ends a server with the thread that started it (rlhf/ranks/parent.py); this thread lives as long as the
# process.
_starter = ThreadPoolExecutor(1, "server-starter")


@dataclass(frozen=True)
class _Server:
    process: "subprocess.Popen[bytes]"
    url: str
    fingerprint: str
    scratch: Scratch


class Keeper:
    """Starts, finds and kills server processes by name."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], output: str, fingerprint: str
    ) -> str:
        """Start `python *command --port PORT` with a free port in place of an earlier server `name`. Return the URL.

        Args:
            environment: all other variables of the server. `start` adds the scratch folder and the parent's process id.
            output: file to which the server's output is appended.
            fingerprint: a hash of everything that must be the same before a later attempt may use the server again.
        """
        self.kill(name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        scratch = Scratch()
        variables = {
            **environment,
            PARENT_PID: str(os.getpid()),
            "TMPDIR": str(scratch.folder),
            "VLLM_RPC_BASE_PATH": str(scratch.folder),
            SCRATCH_NAME: scratch.name,
        }
        try:
            process = _starter.submit(_popen, [*command, "--port", str(port)], variables, Path(output)).result()
        except BaseException:
            scratch.close()
            raise
        self._servers[name] = _Server(process, f"http://127.0.0.1:{port}", fingerprint, scratch)
        return self._servers[name].url

    def find(self, name: str, fingerprint: str) -> str | None:
        """Return the URL of the server `name` if it runs and has this fingerprint, else None."""
        server = self._servers.get(name)
        if server is None or server.process.poll() is not None or server.fingerprint != fingerprint:
            return None
        return server.url

    def poll(self, name: str) -> int | None:
        """Return the exit code of the server `name`, negative for a signal; None if it runs or was never started."""
        return self._servers[name].process.poll() if name in self._servers else None

    def kill(self, name: str) -> None:
        """Kill all processes of the server `name`, and wait until they and their files are gone."""
        if server := self._servers.get(name):
            _end(server.process)
            server.scratch.close()

    def close(self) -> None:
        for name in list(self._servers):
            self.kill(name)


class RemoteKeeper:
    """A `Keeper` in another process: sends each call to its socket. Raises OSError if the process has ended."""

    def __init__(self, path: str) -> None:
        self._path = path

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], output: str, fingerprint: str
    ) -> str:
        return self._call("start", name, list(command), dict(environment), output, fingerprint)

    def find(self, name: str, fingerprint: str) -> str | None:
        return self._call("find", name, fingerprint)

    def poll(self, name: str) -> int | None:
        return self._call("poll", name)

    def kill(self, name: str) -> None:
        self._call("kill", name)

    def close(self) -> None:
        """Leave the servers to the next attempt; the keeper ends them with the run."""

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_CALL_TIMEOUT_S)
                connection.connect(self._path)
                with connection.makefile("rw") as stream:
                    print(json.dumps([method, *arguments]), file=stream, flush=True)
                    answer = stream.readline()
        except OSError as error:
            raise OSError(f"the process that keeps the rollout servers does not answer: {error}") from error
        if not answer:
            raise OSError("the process that keeps the rollout servers ended during a call")
        result, problem = json.loads(answer)
        if problem is not None:
            raise OSError(problem)
        return result


def keeper_of_this_run() -> Keeper | RemoteKeeper:
    """Return the supervisor's keeper; without a supervisor, a new keeper in this process."""
    return RemoteKeeper(path) if (path := os.environ.get(KEEPER)) else Keeper()


def processes_of(group: int) -> list[int]:
    """Return the running processes of a process group; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def _popen(command: Sequence[str], environment: Mapping[str, str], path: Path) -> "subprocess.Popen[bytes]":
    with path.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    group, deadline = process.pid, time.monotonic() + _KILL_TIMEOUT_S
    while running := processes_of(group):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        if time.monotonic() > deadline:
            log.warning("Processes %s of a rollout server don't end on SIGKILL (stuck in the kernel).", running)
            break
        time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.1)


def serve(listener: socket.socket, keeper: Keeper) -> None:
    """Answer calls until the process ends. A call that fails is answered with its error."""
    while True:
        connection, _ = listener.accept()
        # The rank may be killed, or may stop, at any point of its call. Closing the file may raise, too.
        with suppress(OSError), connection, connection.makefile("rw") as stream:
            connection.settimeout(_CALL_TIMEOUT_S)
            call = stream.readline()
            if not call.endswith("\n"):
                continue
            method, *arguments = json.loads(call)
            assert method in _CALLS, method
            result = problem = None
            try:
                result = getattr(keeper, method)(*arguments)
            except OSError as error:
                problem = str(error)
            print(json.dumps([result, problem]), file=stream, flush=True)


def main() -> None:
    die_with_parent()
    keeper = Keeper()

    def leave(number: int, frame: FrameType | None) -> None:
        keeper.close()
        os._exit(0)  # SystemExit would be lost if the signal interrupts a destructor

    signal.signal(signal.SIGTERM, leave)
    serve(socket.socket(fileno=int(sys.argv[1])), keeper)


if __name__ == "__main__":
    main()
