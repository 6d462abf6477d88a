"""Starts the program of an episode. A Python script runs in a forked process that has its imports already.

Importing a client such as `openai` takes about a second, which each episode would pay.
"""

import ast
import atexit
import contextlib
import importlib
import importlib.util
import os
import runpy
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import rlhf
from rlhf.environments.serving import seed_generators


class Program(Protocol):
    """A started program; like `subprocess.Popen`."""

    pid: int

    def wait(self) -> int:
        """Wait for the end and return the exit code, or minus the signal."""


@dataclass
class _Forked:
    pid: int

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def script_of(command: Sequence[str]) -> str | None:
    """Return the path of the Python script that the command runs; None for any other program."""
    return command[1] if len(command) > 1 and command[0] == sys.executable and command[1].endswith(".py") else None


def import_for(script: str) -> None:
    """Import the installed modules that the script imports at its top level. Imports that fail are the script's."""
    body = ast.parse(Path(script).read_bytes()).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in body if isinstance(node, ast.ImportFrom) and not node.level]
    for name in names:
        if not (Path(script).parent / name.partition(".")[0]).with_suffix(".py").exists():
            with contextlib.suppress(BaseException):  # modules of users may end the process
                importlib.import_module(name)


def start(command: Sequence[str], variables: Mapping[str, str], folder: Path, output: int, seed: int) -> Program:
    """Start the program in `folder`.

    Args:
        variables: additions to the environment.
        output: descriptor for the program's output.
        seed: of the global generators of a Python script. After a kill, the script must send the same requests again.
    """
    if (script := script_of(command)) is None:
        return subprocess.Popen(
            command, cwd=folder, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    with warnings.catch_warnings():
        # Python 3.12 warns because this process has another thread. That thread waits in a system call, without locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _become(script, command[1:], variables, folder, output, seed)
    return _Forked(child)


def _become(
    script: str, arguments: Sequence[str], variables: Mapping[str, str], folder: Path, output: int, seed: int
) -> NoReturn:
    code = 1
    atexit._clear()  # the handlers of the process that forked this one
    try:
        _take_streams(output)
        os.chdir(folder)
        os.environ.update(variables)
        sys.argv = list(arguments)
        sys.path[0:0] = [str(Path(script).parent)]
        seed_generators(seed)
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = _code_of(error)
    except BaseException:
        _print_error()
    finally:
        _end(code)


def _take_streams(output: int) -> None:
    """Use `output` for output, no input, and close everything else, such as the trainer's sockets."""
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((null, output, output)):
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(number, "r" if name == "stdin" else "w", buffering=1, errors="backslashreplace")
        setattr(sys, name, stream)


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _print_error() -> None:
    """Print the traceback from the script's first frame on."""
    kind, error, frames = sys.exc_info()
    own = (str(Path(rlhf.__file__).parent), "<frozen runpy>")
    while frames is not None and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(own):
        frames = frames.tb_next
    traceback.print_exception(kind, error, frames)


def _end(code: int) -> NoReturn:
    """End as a Python process does: wait for threads, then call the handlers of `atexit`."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
