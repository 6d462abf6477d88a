"""Makes undisturbed runs, once per session, to compare disturbed runs with."""

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.forked_start import train_forked
from tests.support.launching import Ended, small

EXPORT = "checkpoint.contents=[model,optimizer,extra,hf_model]"


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder shared by all processes of one pytest session, also under xdist."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, name: str, start: Callable[[], Ended]) -> Ended:
    """Return the result of `start()`, called once per session and `name`; other processes wait for it."""
    result = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(json.dumps(asdict(start())))
    return Ended(**json.loads(result.read_text()))


class Undisturbed:
    """The run of `small` on one and on two ranks, with an exported model in each checkpoint."""

    def __init__(self, folder: Path, sums: Path) -> None:
        self.folder, self._sums = folder, sums

    def end(self, nproc: int) -> Ended:
        """Return the end of the run on `nproc` ranks."""
        name = f"undisturbed_{nproc}"
        command = [*small(self.folder, name, self._sums), f"trainer.nproc={nproc}", EXPORT]
        return once(self.folder, name, lambda: train_forked(command))

    def run_dir(self, nproc: int) -> Path:
        """Return the directory of the finished run on `nproc` ranks."""
        end = self.end(nproc)
        assert end.code == 0, end.output
        return self.folder / "rlhf" / f"undisturbed_{nproc}"
