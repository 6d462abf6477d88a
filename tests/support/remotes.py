"""Shares parts of remote-copy tests: a run with checkpoints, and a remote that fails, hangs, dies or kills on cue."""

import errno
import functools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.remote.retries import Retries
from rlhf.config import Config
from rlhf.events import LISTENER_VARIABLE
from rlhf.ranks.parent import SUPERVISOR_PID
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import HISTORY, RUN_FILE
from tests.support.checkpoints import PlainRole, files_of, make_config, save_steps
from tests.support.sections import claim, remote_copies, remote_store, restore

DEADLINE_S = 30.0
KILL_VARIABLE = "RLHF_TEST_KILL_ONCE_COPIED"
_seen = 0


class InjectedFaults:
    """Faults of the next calls to the faulty remote, shared by all its instances in this process."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """Name and path of every call."""
        self.before: Callable[[int, str, str], None] = lambda number, call, path: None
        """Called before each call with the call's number (from 1), name and path. If it raises, the call fails."""
        self._lock = threading.Lock()

    def meet(self, call: str, path: str) -> None:
        with self._lock:
            self.calls.append((call, path))
            number = len(self.calls)
        self.before(number, call, path)

    def fail_every(self, k: int) -> None:
        def before(number: int, call: str, path: str) -> None:
            if number % k == 0:
                raise OSError(errno.EIO, "asked for by the test", path)

        self.before = before

    def kill_at(self, n: int, call: str | None = None) -> None:
        """SIGKILL this process at the `n`th call (named `call`)."""

        def before(number: int, name: str, path: str) -> None:
            seen = number if call is None else sum(1 for made, _ in self.calls if made == call)
            if seen == n and call in (None, name):
                os.kill(os.getpid(), signal.SIGKILL)

        self.before = before


FAULTS = InjectedFaults()


class FaultyFile(LocalFileOpener):
    def write(self, data: bytes) -> int:
        FAULTS.meet("write", self.path)
        return super().write(data)


LOCAL = LocalFileSystem()


class FaultyFileSystem(LocalFileSystem):
    """A local folder with the faults of `InjectedFaults`."""

    protocol = "faulty"

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> LocalFileOpener:
        FAULTS.meet(f"open {mode}", path)
        if "w" in mode:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        return FaultyFile(path, mode, fs=self)

    def info(self, path: str, **kwargs: Any) -> dict:
        FAULTS.meet("info", path)
        return LOCAL.info(path)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list:
        FAULTS.meet("ls", path)
        return LOCAL.ls(path, detail)

    def rm_file(self, path: str) -> None:
        FAULTS.meet("rm_file", path)
        LOCAL.rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete one file per call, like an object store."""
        FAULTS.meet("rm", path)
        for name in LOCAL.find(path):
            self.rm_file(name)
        shutil.rmtree(path)


fsspec.register_implementation("faulty", FaultyFileSystem)


def make_run(folder: Path, *steps: int, remote: str, run_id: str = "run-a") -> Config:
    """Make a run directory below `folder` with checkpoints of `steps`, history and identity."""
    config = make_config(folder)
    config.checkpoint.remote = remote
    config.checkpoint.max_to_keep = None
    config.checkpoint.async_save = False
    if steps:
        shutil.copytree(_saved(steps), config.run_dir)
    identify(config, run_id)
    return config


@functools.cache
def _originals() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="rlhf-remotes-")


@functools.cache
def _saved(steps: tuple[int, ...]) -> Path:
    """Return a cached directory with checkpoints of `steps` and history, to be copied."""
    config = make_config(Path(_originals().name, "-".join(map(str, steps))))
    config.checkpoint.max_to_keep = None
    config.run_dir.mkdir(parents=True)
    save(config, *steps)
    return config.run_dir


def identify(config: Config, run_id: str, **more: str) -> None:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / RUN_FILE).write_text(json.dumps({"run_id": run_id, **more}) + "\n")


def save(config: Config, *steps: int) -> None:
    """Record and save steps, each with different state."""
    history = config.run_dir / HISTORY
    for step in steps:
        known = len(history.read_text().splitlines()) if history.exists() else 0
        with history.open("a") as file:
            file.writelines(
                json.dumps({"step": number, "loss": 0.1 * number}) + "\n" for number in range(known + 1, step + 1)
            )
        save_steps(config, PlainRole(seed=step), step)


def copy_all(config: Config, *, deadline_s: float = DEADLINE_S) -> list[int]:
    """Copy all checkpoints in one start; return the steps not copied."""
    copies = remote_copies(config)
    copies.start()
    return copies.finish(deadline_s)


def on_empty_disk(config: Config, folder: Path) -> Config:
    """Return the configuration of the same run on another machine."""
    other = make_config(folder)
    other.checkpoint.remote = config.checkpoint.remote
    other.checkpoint.async_save = False
    return other


def start_from_remote(config: Config, source: Path | None = None) -> int | None:
    """Run a start up to the ranks (restore, identity, claim); return the restored step."""
    store = remote_store(config)
    step = restore(store, config, source)
    if not (config.run_dir / RUN_FILE).exists():
        identify(config, "run-new")
    claim(store, config, long_retries())
    return step


def long_retries() -> Retries:
    return Retries("remote", stalled_s=DEADLINE_S, give_up_s=DEADLINE_S)


def complete_steps(config: Config) -> list[int]:
    """Return the steps with a valid manifest in the remote folder."""
    store = remote_store(config)
    return [step for step in store.steps() if store.copy(step) is not None]


def kill_once_copied(copy: Path, event: str, number: int) -> dict[str, str]:
    """Return the environment in which the `number`th `event` waits until `copy` is complete, then kills the
    supervisor and with it the ranks."""
    return {
        LISTENER_VARIABLE: f"{__name__}:on_event",
        KILL_VARIABLE: json.dumps({"copy": str(copy), "event": event, "number": number}),
    }


def on_event(event: str) -> None:
    """Listen to events in the ranks."""
    global _seen
    plan = json.loads(os.environ[KILL_VARIABLE])
    if event != plan["event"]:
        return
    _seen += 1
    if _seen == plan["number"]:
        end = time.monotonic() + DEADLINE_S
        while not _is_complete(Path(plan["copy"])):
            assert time.monotonic() < end, f"{plan['copy']} is not complete"
            time.sleep(0.05)
        os.kill(int(os.environ[SUPERVISOR_PID]), signal.SIGKILL)


def _is_complete(copy: Path) -> bool:
    try:
        return bool(read_manifest(copy))
    except DamagedCheckpoint:
        return False


def assert_same_files(one: Path, other: Path) -> None:
    assert files_of(one) == files_of(other)
    for name in files_of(one):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def remote_dir(tmp_path: Path, step: int) -> Path:
    return tmp_path / "remote" / "rlhf" / "default" / f"global_step_{step}"
