"""Controls the host of environments: starts it, asks for processes and kills them."""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any

from rlhf.config.agent_command import COMMAND, files_of, split_command
from rlhf.config.schema.env import EnvConfig
from rlhf.config.user_functions import ENV_CLASSES, check_unchanged, hash_at_start
from rlhf.environments.definition import Definition
from rlhf.environments.host import MESSAGE_BYTES
from rlhf.errors import UserError
from rlhf.printable import printable_output
from rlhf.reward.confinement import Confinement
from rlhf.reward.environment import reward_environment
from rlhf.storage.files import remove_dir

log = logging.getLogger(__name__)
START_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
MAX_OUTPUT_BYTES = 1 << 22
"""A rank shows at most this many bytes of its environments' output."""


@dataclass(eq=False)
class Process:
    """A process that serves environments."""

    number: int
    control: socket.socket
    single: bool
    """Whether the process serves one environment and then ends."""
    gone: bool = False
    """Whether the process was killed, or was released and ends by itself."""
    sessions: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def connect(self) -> socket.socket:
        """Return the socket of a new environment object. Raises OSError if the process is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [b"open"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours


class Host:
    """One host process; any thread may use it. Start it from a thread that lives as long as the host."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        self._setting = COMMAND if config.command is not None else ENV_CLASSES
        self._files = [*config.classes, *files_of(config.command)]
        self._hash = hash_at_start(self._setting, self._files)
        self._numbers = count()
        self._processes: dict[int, Process] = {}
        self.definitions: list[Definition] = []

    def start(self) -> None:
        """Start the host unless it is running.

        Raise UserError if a class cannot be imported or is not an environment, or if a user's file has changed since
        this handle was made.
        """
        with self._lock:
            if self._popen is None:
                if self.definitions:
                    log.warning("The process that starts environments died; starting it again.")
                self._start()

    def process(self, *, single: bool, alone: bool, name: str = "") -> Process:
        """Return a new process, forked from the host.

        Args:
            single: the process serves one environment.
            alone: `env.process=episode`, so the process' global state belongs to this environment.
            name: unique name of an agent's episode, for the program's folder; empty for an environment class.
        """
        with self._lock:
            self.start()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = Process(next(self._numbers), ours, single)
            with theirs:
                try:
                    request = json.dumps({"fork": process.number, "alone": alone, "name": name}).encode()
                    socket.send_fds(self._channel, [request], [theirs.fileno()])
                except OSError:
                    ours.close()
                    self.close()
                    raise
            self._processes[process.number] = process
            return process

    def kill(self, process: Process) -> None:
        """Kill the process and everything that it started."""
        with self._lock:
            process.gone = True
            try:
                if self._popen is not None:
                    self._channel.send(json.dumps({"kill": process.number}).encode())
                    self._channel.recv(MESSAGE_BYTES)
            except OSError:  # also a timeout
                self.close()
            # Close the socket after the kill. Otherwise the process ends by itself, and what it started lives on.
            self._forget(process)

    def release(self, process: Process) -> None:
        """Let a process end by itself; it ends when its environments are closed."""
        with self._lock:
            process.gone = True
            self._forget(process)

    def _forget(self, process: Process) -> None:
        self._processes.pop(process.number, None)
        process.control.close()

    def close(self) -> None:
        """End the host and all processes of environments, even in the middle of a call."""
        with self._lock:
            popen, self._popen = self._popen, None
            if popen is None:
                return
            with contextlib.suppress(OSError):  # without namespaces, a kill of the host would not reach all processes
                self._channel.send(json.dumps({"kill": None}).encode())
                self._channel.recv(MESSAGE_BYTES)
            for process in list(self._processes.values()):
                process.gone = True
                self._forget(process)
            self._channel.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            self._output.join(KILL_TIMEOUT_S)
            if self._folder:
                remove_dir(Path(self._folder), ignore_errors=True)

    def _first_message(self) -> bytes:
        """Return the settings for the host. Raise UserError if they are too large."""
        config = self._config
        command = None if config.command is None else split_command(config.command)
        settings = {"classes": config.classes, "kwargs": config.kwargs, "command": command}
        message = json.dumps(settings | {"process": config.process, "timeout_s": config.timeout_s}).encode()
        if len(message) > MESSAGE_BYTES:
            raise UserError(
                f"env.kwargs makes a message of {len(message)} bytes to the process of environments, and at most "
                f"{MESSAGE_BYTES} are possible. Pass the path of a file instead."
            )
        return message

    def _start(self) -> None:
        config, message = self._config, self._first_message()
        writable = [str(Path(path).expanduser().absolute()) for path in config.writable]
        loopback = config.command is not None
        rights = Confinement(config.memory_gb, config.network, writable, loopback=loopback)
        confinement = json.dumps(dataclasses.asdict(rights))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel, self._folder = ours, ""
        arguments = [str(os.getpid()), confinement, str(theirs.fileno())]
        with theirs:
            # -P keeps the working directory out of sys.path. New session: only the trainer receives Ctrl-C.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlhf.environments.host", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # Repeated calls must have the same replies, even if a reply depends on the order of a set.
                env={"PYTHONHASHSEED": "0"} | reward_environment(os.environ, config.pass_env),
                start_new_session=True,
            )
        assert self._popen.stdout is not None
        self._output = threading.Thread(target=_forward, args=(self._popen.stdout,), daemon=True)
        self._output.start()
        ours.settimeout(START_TIMEOUT_S)
        reply: dict[str, Any] = {}
        try:
            ours.send(message)
            reply = json.loads(ours.recv(MESSAGE_BYTES) or b"{}")
        except OSError as error:
            reply = {"error": f"the process of environments was not ready ({error})", "user": False}
        ours.settimeout(KILL_TIMEOUT_S)
        self._folder = reply.get("folder", "")
        try:
            # Promise 13: a host that starts again must not run a file that was edited meanwhile.
            check_unchanged(self._setting, self._files, self._hash)
        except UserError:
            self.close()
            raise
        if "definitions" not in reply:
            self.close()
            found = reply.get("error", "the process of environments died while it started")
            raise UserError(found if reply.get("user") else f"{config.shown}: {found}. Correct the file.")
        self.definitions = [Definition(**each) for each in reply["definitions"]]


def _forward(pipe: IO[bytes]) -> None:
    """Show the output of the environments, up to the limit."""
    left = MAX_OUTPUT_BYTES
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            if left > 0:
                sys.stderr.write(printable_output(data[:left].decode(errors="replace")))
                if len(data) >= left:
                    log.warning("The environments printed more than %d bytes; the rest is left out.", MAX_OUTPUT_BYTES)
            left -= len(data)
