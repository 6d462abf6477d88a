"""Starts the process that keeps a run's rollout servers alive through crashes of the ranks."""

import signal
import socket
import subprocess
from contextlib import suppress

from rlhf.launch.local.processes import start_process
from rlhf.ranks.parent import KEEPER, STOPPED, state_of
from rlhf.storage.scratch import Scratch

_CLOSE_S = 30.0


class ServerKeeper:
    """Controls the process `rlhf.rollout.servers.keeper` for the supervisor. Call `close` at the end."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, str]:
        """Start the process if it does not run, and replace it if SIGSTOP or a debugger has stopped it.

        Return the environment variable with which ranks find the socket of the process.
        """
        if self._process is None or self._process.poll() is not None or state_of(self._process.pid) in STOPPED:
            self.close()
            self._scratch = Scratch()  # a private folder, so only this user reaches the socket
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self._scratch.folder / "keeper"))
                listener.listen()
                command = ["-m", "rlhf.rollout.servers.keeper", str(listener.fileno())]
                self._process = start_process(command, [listener.fileno()], {}, None)
        assert self._scratch is not None
        return {KEEPER: str(self._scratch.folder / "keeper")}

    def close(self) -> None:
        """End the process, which ends its servers first."""
        if self._process is not None:
            if state_of(self._process.pid) not in STOPPED:
                self._process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_CLOSE_S)
            self._process.kill()  # the kernel then kills the servers
            self._process.wait()
        if self._scratch is not None:
            self._scratch.close()
        self._process = self._scratch = None
