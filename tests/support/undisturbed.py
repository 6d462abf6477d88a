"""Runs that nothing interrupts, which disturbed ones are compared with: each is made once per session, by whichever
test asks first."""

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
    """A folder that the processes of one pytest session share, whether it has one or, under xdist, several."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, name: str, start: Callable[[], Ended]) -> Ended:
    """What `start()` returns, called by the first of a session's processes that comes here with `name`; the others wait
    for it."""
    result = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(json.dumps(asdict(start())))
    return Ended(**json.loads(result.read_text()))


class Undisturbed:
    """The run of `small` on one rank and on two, with an exported model in each checkpoint."""

    def __init__(self, folder: Path, sums: Path) -> None:
        self.folder, self._sums = folder, sums

    def end(self, nproc: int) -> Ended:
        """How the run on `nproc` ranks ended."""
        name = f"undisturbed_{nproc}"
        command = [*small(self.folder, name, self._sums), f"trainer.nproc={nproc}", EXPORT]
        return once(self.folder, name, lambda: train_forked(command))

    def run_dir(self, nproc: int) -> Path:
        """The directory of the finished run on `nproc` ranks."""
        end = self.end(nproc)
        assert end.code == 0, end.output
        return self.folder / "rlhf" / f"undisturbed_{nproc}"
