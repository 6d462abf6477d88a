"""Starts training under its supervisor without imports: forks the supervisor from the tests' server, and the launcher
from the supervisor."""

import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from rlhf.launch.local import launcher_process
from rlhf.launch.local.rank_output import RankOutput
from rlhf.ranks import launcher
from rlhf.ranks.parent import PARENT_PID
from rlhf.ranks.stop import STOP_SIGNALS, exit_on_stop_signal
from tests.support.launching import DEADLINE_S, ROOT, Ended
from tests.support.preload import forkserver

_POLL_S = 0.01


def train_forked(
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    folder: Path = ROOT,
    module: str = "rlhf.train",
) -> Ended:
    """Run `launching.train`, or another command `module`, in `folder`.

    This is seven CPU seconds cheaper, for tests that do not test process starts.
    """
    with tempfile.NamedTemporaryFile("r") as log:
        variables = {**os.environ, **(environment or {})}
        process = forkserver.Process(target=_supervisor, args=(list(arguments), variables, folder, log.name, module))
        process.start()
        process.join(deadline_s)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        output = log.read()
    assert code is not None, f"the run hangs:\n{output}"
    return Ended(code, output)


def _supervisor(arguments: list[str], environment: dict[str, str], folder: Path, log: str, module: str) -> NoReturn:
    exit_on_stop_signal()
    os.environ.clear()
    os.environ.update(environment)
    # A new process would have these folders.
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ["", *sys.path]]
    os.chdir(folder)
    _redirect(0, os.open(os.devnull, os.O_RDONLY))
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    _redirect(1, fd)
    _redirect(2, fd)
    launcher_process.start_launcher = _Starts(launcher_process.start_launcher)
    code = importlib.import_module(module).main(arguments)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


class _Starts:
    """Replaces `start_launcher`: forks the first launcher, but starts later launchers with `started`, since this
    process then has locks that a fork must not inherit."""

    def __init__(self, started: Any) -> None:
        self._started = started
        self._first = True

    def __call__(self, fd: int, modules: Sequence[str], variables: Mapping[str, str], output: RankOutput | None) -> Any:
        first, self._first = self._first, False
        if not first:
            return self._started(fd, modules, variables, output)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of a fork beside other threads. The only other thread writes the run's output, which
            # launchers and ranks do not need.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _launcher(fd, modules, variables, output)
        return _Child(pid)


def _launcher(fd: int, modules: Sequence[str], variables: Mapping[str, str], output: RankOutput | None) -> NoReturn:
    """Run the launcher, and each rank that it forks, to its end."""
    code = 1
    try:
        os.setsid()
        os.environ.update(variables, **{PARENT_PID: str(os.getppid())})
        if output is not None:
            os.environ.update(output.variables)
            _redirect(1, output.stdout)
            _redirect(2, output.stderr)
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        logging.getLogger().handlers.clear()
        launcher.main(fd, modules)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(number: int, fd: int | None) -> None:
    if fd is not None:
        os.dup2(fd, number)


class _Child:
    """A forked process with the methods of `subprocess.Popen` that a supervisor calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("the launcher", timeout or 0.0)
            else:
                time.sleep(_POLL_S)
        return self._code
