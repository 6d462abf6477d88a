"""Starts the program of an episode in a forked process, which may write only to the episode's folder.

A Python script runs in the fork itself, which has the script's imports already. Otherwise each episode would spend
about a second on importing a client such as `openai`.
"""

import ast
import atexit
import contextlib
import importlib
import importlib.util
import os
import runpy
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import rlhf
from rlhf.environments.serving import seed_generators
from rlhf.reward.confinement import restrict_to
from rlhf.reward.kernel import PR_SET_PDEATHSIG, prctl
from rlhf.reward.namespaces import SHARED_MEMORY


@dataclass(frozen=True)
class ProgramStart:
    """Starts the program of each episode."""

    command: Sequence[str]
    writable: Sequence[str]
    """Folders that the programs may write to, besides their own."""
    network: bool

    def run(self, variables: Mapping[str, str], folder: Path, output: int, seed: int) -> int:
        """Start the program in `folder` and return its process id.

        Args:
            variables: additions to the environment.
            output: descriptor for the program's output.
            seed: seeds a Python script's global generators, so that the script sends the same requests again after
                a kill.
        """
        with warnings.catch_warnings():
            # Python 3.12 warns because this process has other threads. They wait in system calls, without locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            self._become(variables, folder, output, seed)
        return child

    def _become(self, variables: Mapping[str, str], folder: Path, output: int, seed: int) -> NoReturn:
        code = 1
        try:
            if sys.platform == "linux":
                # Without namespaces, nothing else ends the program if this process is killed.
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # The fork's only thread was a daemon, and the script's threads would inherit this.
            threading.current_thread()._daemonic = False  # type: ignore[attr-defined]
            _take_streams(output)
            os.chdir(folder)
            os.environ.update(variables)
            tempfile.tempdir = None  # forget the cached folder
            # Programs of one rank share a user. With Landlock, no program can write into the folder of another
            # program, read its variables or signal its processes.
            restrict_to([str(folder), SHARED_MEMORY, *self.writable], abstract_sockets=self.network)
            if (script := script_of(self.command)) is None:
                # Drop PYTHONPATH's first folder: a program with packages of its own must not import the trainer's.
                os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").partition(os.pathsep)[2]
                os.execvp(self.command[0], list(self.command))
            sys.argv = list(self.command[1:])
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


def script_of(command: Sequence[str]) -> str | None:
    """Return the path of the Python script that the command runs; None for any other program."""
    return command[1] if len(command) > 1 and command[0] == sys.executable and command[1].endswith(".py") else None


def import_for(script: str) -> None:
    """Import the installed modules that the script imports at its top level. Ignore errors: the script reports them.

    Do not import modules of the script's folder: they may read variables that only the program has.
    """
    atexit._clear()  # the programs must not run the handlers of this process
    body = ast.parse(Path(script).read_bytes()).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in body if isinstance(node, ast.ImportFrom) and not node.level]
    folder = Path(script).parent
    for name in names:
        top = name.partition(".")[0]
        if _is_installed(top) and not (folder / top).exists() and not (folder / f"{top}.py").exists():
            with contextlib.suppress(BaseException):  # modules of users may end the process
                importlib.import_module(name)


def _is_installed(name: str) -> bool:
    if name in sys.stdlib_module_names:
        return True
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return found is not None and found.origin is not None and found.origin.startswith(tuple(places))


def _take_streams(output: int) -> None:
    """Redirect stdout and stderr to `output`, leave stdin empty, and close all else, such as the trainer's sockets."""
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
    """End as a Python process does: wait for executors and threads, then call the handlers of `atexit`."""
    try:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code if 0 <= code <= 255 else 255)
