"""Runs small scripts instead of the worker under a supervisor, for tests without a model."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf.config import Config
from rlhf.launch.local.rank_output import RankOutput
from rlhf.launch.local.starter import LocalStarter, RankNeeds
from rlhf.launch.stop_request import StopRequest
from rlhf.launch.supervisor import run_attempts

# Beginning of every rank script, in the same order as the worker.
RANK = """
import os, signal, sys, time
from pathlib import Path
from rlhf.ranks.parent import die_with_parent
die_with_parent()
from rlhf.ranks.lock import lock_as_rank
from rlhf.ranks.logs import write_whole_lines
from rlhf.ranks.stop import PreemptionFlag
from rlhf.ranks.status import StatusWriter
rank, run_dir = int(os.environ["RANK"]), Path(sys.argv[1])
supervisor = int(os.environ["RLHF_SUPERVISOR_PID"])
write_whole_lines()
lock_as_rank(run_dir)
status = StatusWriter(run_dir, rank)
flag = PreemptionFlag()
with (run_dir / "starts").open("a") as starts:
    starts.write(f"{rank} {os.getpid()}\\n")
number = sum(line.startswith(f"{rank} ") for line in (run_dir / "starts").read_text().splitlines())

def block():
    while True:  # a collective with a dead peer: the signal's handler runs, nothing follows from it
        time.sleep(100)

def peers_started():  # each as often as this rank
    def times(other):
        return sum(line.startswith(f"{other} ") for line in (run_dir / "starts").read_text().splitlines())
    while min(map(times, range(int(os.environ["WORLD_SIZE"])))) < number:
        time.sleep(0.01)

def peers_passed(mark):
    (run_dir / f"{mark}_{number}_{rank}").touch()
    while len(list(run_dir.glob(f"{mark}_{number}_*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)

def peers_ended():
    pids = [line.split()[1] for line in (run_dir / "starts").read_text().splitlines()]
    while any(runs(pid) for pid in pids if int(pid) != os.getpid()):
        time.sleep(0.01)

def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
"""

SUPERVISOR = """
import sys
from pathlib import Path
from rlhf.config.resolved import load
from rlhf.ranks.lock import run_lock, wait_for_ranks
from rlhf.ranks.logs import configure_logging
from rlhf.launch.stop_request import StopRequest
from rlhf.launch.supervisor import run_attempts
from tests.support.rank_scripts import local_starter
configure_logging()
config = load(Path(sys.argv[1]))
with run_lock(config.run_dir), StopRequest() as stop, local_starter(config, []) as starter:
    wait_for_ranks(config.run_dir)
    sys.exit(run_attempts(config, [sys.argv[2], str(config.run_dir)], starter, stop))
"""


def needs_of(config: Config) -> RankNeeds:
    return RankNeeds.of(config.trainer, config.data, config.backend, config.rollout)


def local_starter(config: Config, modules: Sequence[str], output: RankOutput | None = None) -> LocalStarter:
    """Return a starter of ranks that import `modules`."""
    return LocalStarter(config.trainer, config.run_dir, replace(needs_of(config), modules=modules), output)


def supervised(config: Config, path: Path, text: str, modules: Sequence[str] = ()) -> int:
    """Write the ranks' script to `path`, run it under a supervisor in this process, and return the exit code.

    By default the ranks are forked from a launcher that has imported `modules`.
    """
    path.write_text(text)
    with StopRequest() as stop, local_starter(config, modules) as starter:
        return run_attempts(config, [str(path), str(config.run_dir)], starter, stop)


def starts(config: Config) -> list[tuple[int, int]]:
    path = config.run_dir / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(rank), int(pid)) for rank, pid in map(str.split, lines)]


def wait_until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
