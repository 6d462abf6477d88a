"""Imports the ranks' modules once, and forks the ranks of every attempt.

The supervisor starts `python -m rlhf.ranks.launcher FD MODULE ...` and sends requests over the socket FD. A fork copies
one thread only, and breaks CUDA contexts and connections. So the launcher checks before each fork that it has neither
other threads nor CUDA. It also checks that the files of its modules have not changed, because ranks would import new
code beside the old code. A forked rank runs as `python *command` would: as `__main__`, with its own session, signals
and environment.
"""

import gc
import importlib
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socket
from typing import NoReturn

from rlhf.ranks.launch_messages import CountDevices, Devices, Fork, Forked, RankEnded
from rlhf.ranks.loaded_sources import LoadedSources
from rlhf.ranks.parent import PARENT_PID, die_with_parent
from rlhf.ranks.stop import STOP_SIGNALS
from rlhf.ranks.world import listening_socket, rank_variables

_NO_COUNT = 255
_HANDLED = (*STOP_SIGNALS, signal.SIGCHLD)


def fork_problem() -> str | None:
    """Return why a fork of this process is not safe, in words that call the process "it"; None if a fork is safe."""
    torch = sys.modules.get("torch")
    if (torch is not None and torch.cuda.is_initialized()) or _has_cuda_open():
        return "CUDA is initialized in it"
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return "it is in a process group"
    threads = _threads()
    if len(threads) > 1:
        return f"{len(threads)} threads run in it ({', '.join(sorted(threads))})"
    return None


def _threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            names.append((task / "comm").read_text().strip())
    return names


def _has_cuda_open() -> bool:
    """Return whether the CUDA driver runs in this process. The driver opens `nvidia-uvm`; NVML does not."""
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # listing the folder used a descriptor that is closed now
            if fd.readlink().name == "nvidia-uvm":
                return True
    return False


class Launcher:
    """Answers the supervisor's requests, and reports each rank that ends.

    Dead ranks stay zombies until the next fork, so that the supervisor never signals a reused process id.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._problem: str | None = None
        self._sources = LoadedSources()
        self._running: dict[int, int] = {}
        self._ended: list[int] = []
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        # A scheduler may signal all processes of a job, and the launcher must survive. Signals that were ignored at the
        # start stay ignored in the launcher and in the ranks.
        self._handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in _HANDLED
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def load(self, modules: Sequence[str]) -> None:
        try:
            for module in modules:
                importlib.import_module(module)
        except Exception as error:  # a rank in a new process fails likewise, and reports the traceback
            self._problem = f"it cannot import {module} ({type(error).__name__}: {error})"
        self._sources.add_modules()
        # Freeze the objects: the garbage collector writes marks into objects, and each write would copy a page that
        # the ranks share with this process.
        gc.collect()
        gc.freeze()

    def serve(self) -> tuple[str, ...]:
        """Answer requests, and exit when the supervisor is dead. Return only in a forked rank, with its command."""
        while True:
            ready = wait([self._connection, self._woken])
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._report_ended()
            if self._connection not in ready:
                continue
            try:
                request = self._connection.recv()
            except (EOFError, ConnectionResetError):
                self._end()
            if isinstance(request, CountDevices):
                self._connection.send(self._devices())
            elif self._fork(request):
                return request.command

    def _report_ended(self) -> None:
        for rank, pid in list(self._running.items()):
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                self._connection.send(RankEnded(rank, code))
                self._ended.append(self._running.pop(rank))

    def _end(self) -> None:
        for pid in self._running.values():
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        os._exit(0)

    def _fork(self, request: Fork) -> bool:
        """Fork the ranks and answer. Return True in each forked rank."""
        while self._ended:
            os.waitpid(self._ended.pop(), 0)
        problem = self._problem or fork_problem() or self._sources.problem()
        if problem is not None:
            self._connection.send(Forked({}, problem))
            return False
        # Block signals until a forked rank has its own handlers, so that signals act there as in any new process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            with listening_socket() as listener:
                launcher = os.getpid()
                for rank in range(request.nproc):
                    pid = os.fork()
                    if pid == 0:
                        self._become(rank, launcher, request, listener)
                        return True
                    self._running[rank] = pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._connection.send(Forked(dict(self._running)))
        return False

    def _become(self, rank: int, launcher: int, request: Fork, listener: socket) -> None:
        os.setsid()
        os.environ.update(request.variables)
        os.environ.update(rank_variables(rank, request.nproc, listener))
        os.environ[PARENT_PID] = str(launcher)
        if rank == 0:
            listener.detach()  # keep the descriptor open: rank 0 finds its number in the environment
        self._connection.close()
        signal.set_wakeup_fd(-1)
        os.close(self._wake)
        os.close(self._woken)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _devices(self) -> Devices:
        problem = self._problem or fork_problem()
        if problem is not None:
            return Devices(0, problem)
        pid = os.fork()
        if pid == 0:  # counting initializes CUDA, so it needs a process of its own
            _exit_with_device_count()
        count = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return (
            Devices(count) if 0 <= count < _NO_COUNT else Devices(0, "counting the CUDA devices in a fork of it failed")
        )


def _exit_with_device_count() -> NoReturn:
    count = _NO_COUNT
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    finally:
        os._exit(count)


def run(command: Sequence[str]) -> None:
    """Run `python *command` in this process: `-m MODULE` or a file, with its arguments."""
    if command[0] == "-m":
        sys.argv = list(command[1:])
        # The launcher has imported the module, which now runs again as __main__.
        sys.modules.pop(command[1], None)
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


def main(fd: int, modules: Sequence[str]) -> None:
    """Run the launcher and, in each forked process, the rank."""
    die_with_parent()
    launcher = Launcher(Connection(fd))
    launcher.load(modules)
    run(launcher.serve())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
