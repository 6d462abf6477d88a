"""Races for one run directory: between ranks of one run, and between independent runs."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf.checkpoint.start.domains import find_domains
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.config import Config
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.ranks.lock import run_lock, run_lock_together
from rlhf.ranks.status import StatusWriter
from tests.support.checkpoints import make_config, run_ranks
from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import ranks, small
from tests.support.preload import forkserver
from tests.support.published import eventually
from tests.support.sections import prepare
from tests.support.thread_ranks import make_coordinator, run_thread_ranks
from tests.support.undisturbed import EXPORT

PROCESSES = 8
DEADLINE_S = 300


def set_up_as_torchrun_does(rank: int, config: Config, set_ups: int) -> dict[str, Any]:
    """Repeat the set-up of a new attempt on every rank. Every second set-up overwrites the run."""
    coordinator, delays = make_coordinator(), random.Random(rank)
    run_dir, runs, overwritten = config.run_dir, [], 0
    mark, leftover = run_dir / f"mark_{rank}", run_dir / f".tmp-global_step_{rank}-x"
    run_dir.mkdir(parents=True, exist_ok=True)
    for number in range(set_ups):
        config.trainer.overwrite = number % 2 == 1
        if delays.random() < 0.05:
            time.sleep(0.002 * delays.random())
        with run_lock_together(run_dir, coordinator):
            assert find_domains(run_dir, coordinator) == [0] * PROCESSES
            prepare(config, coordinator)
            # No rank continues before the directory is ready.
            assert not leftover.exists()
            status = StatusWriter(run_dir, rank)
            coordinator.all_gather(None)
            os.close(status._fd)  # a rank keeps it open until its process ends; here many ranks share one process
        assert mark.exists() == (number > 0 and not config.trainer.overwrite)
        identity = read_run_file(run_dir)["run_id"]
        assert (identity in runs) == (number > 0 and not config.trainer.overwrite)
        runs.append(identity)
        overwritten += config.trainer.overwrite
        # Files for the next set-up to delete: one of every rank, and the leftovers of a killed save.
        mark.touch()
        (leftover / "actor").mkdir(parents=True)
    return {"set_ups": number + 1, "overwritten": overwritten, "runs": len(set(runs)), "seen": " ".join(runs)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_eight_ranks_set_up_a_run_directory_without_races(tmp_path, request, kind):
    """Find, almost certainly, a race that fails in one of a hundred set-ups. Threads use the same files and locks as
    processes at a hundredth of the cost. --full-product runs more set-ups in processes."""
    whole = request.config.getoption("--full-product", False)
    set_ups = 500 if kind == "threads" else 1000 if whole else 30
    work = (PROCESSES, set_up_as_torchrun_does, make_config(tmp_path), set_ups)
    if kind == "threads":
        results = run_thread_ranks(*work, deadline_s=DEADLINE_S)
    else:
        results = run_ranks(*work, deadline_s=DEADLINE_S, join=tmp_path / "join")
    # The first set-up creates the run; each overwrite creates a new run.
    expected = {"set_ups": set_ups, "overwritten": set_ups // 2, "runs": set_ups // 2 + 1, "seen": results[0]["seen"]}
    assert results == [expected] * PROCESSES


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return inode, time of the last change and content of every file below `folder`."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def stands_still(run_dir: Path) -> int | None:
    """Return the process with the run's lock, if it is stopped."""
    text = (run_dir / "run.lock").read_text() if (run_dir / "run.lock").exists() else ""
    pid = json.loads(text)["pid"] if text else None
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if pid else ""
    return pid if state == "T" else None


def test_a_refused_second_launch_leaves_the_first_run_as_it_was(tmp_path, sums, launches, undisturbed):
    """A rejected start must not replace the first run's status files: that run's watchdog would kill its ranks."""
    command = [*small(tmp_path, "first", sums), EXPORT]
    first = launches.submit(ranks, tmp_path / "first.log", command, at("update.before", 2, "SIGSTOP"))
    run_dir = tmp_path / "rlhf" / "first"
    eventually(lambda: stands_still(run_dir) is not None, DEADLINE_S)
    pid, before = stands_still(run_dir), snapshot(run_dir)
    assert pid is not None
    try:
        second = ranks(tmp_path / "second.log", command, nproc=2)
        after = snapshot(run_dir)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert second.code == EXIT_USER_ERROR, second.output
    assert f"Another run is writing into {run_dir}: process {pid}" in second.output
    assert after == before
    end = first.result()
    assert end.code == EXIT_DONE, end.output
    assert differences(undisturbed.run_dir(1), run_dir) == []


def fail_on_the_leader(rank: int, config: Config) -> str:
    """Return the error that this rank gets when the set-up fails on the leader only."""
    try:
        make_coordinator().on_leader(lambda: prepare(config))
    except UserError as error:
        return str(error)
    return "no error"


def test_an_error_of_the_leader_reaches_every_rank(tmp_path):
    config = make_config(tmp_path)
    config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(tmp_path / "nothing")
    results = run_thread_ranks(PROCESSES, fail_on_the_leader, config)
    assert len(set(results)) == 1
    assert results[0].startswith(f"trainer.resume_from_path={tmp_path / 'nothing'} is not a checkpoint")


def start_a_run(number: int, config: Config, marker: Path, attempts: int, outcome) -> None:
    """Start independent runs: each locks, sets up, checks the directory and leaves."""
    chance, held, rejected = random.Random(number), 0, 0
    run_dir = config.run_dir
    try:
        while held < attempts:
            config.trainer.overwrite = chance.random() < 0.5
            run_dir.mkdir(parents=True, exist_ok=True)
            try:
                with run_lock(run_dir):
                    # Fails if another process is between here and the unlink.
                    os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
                    prepare(config)
                    identity = read_run_file(run_dir)
                    (run_dir / ".tmp-global_step_1-x").mkdir()
                    time.sleep(0.0005 * chance.random())
                    assert read_run_file(run_dir) == identity
                    marker.unlink()
                    held += 1
            except UserError as error:
                if not str(error).startswith(f"Another run is writing into {run_dir}: "):
                    raise
                rejected += 1
            time.sleep(0.002 * chance.random())
    except BaseException as error:
        outcome.put(f"process {number}: {type(error).__name__}: {error}")
        raise
    outcome.put((held, rejected))


def test_independent_runs_take_turns_or_are_rejected(tmp_path):
    # Promise 12.
    config, attempts = make_config(tmp_path), 25
    outcomes = forkserver.Queue()
    processes = [
        forkserver.Process(target=start_a_run, args=(i, config, tmp_path / "marker", attempts, outcomes))
        for i in range(PROCESSES)
    ]
    try:
        for process in processes:
            process.start()
        results = [outcomes.get(timeout=DEADLINE_S) for _ in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert all(isinstance(result, tuple) for result in results), results
    assert [held for held, _ in results] == [attempts] * PROCESSES
    assert sum(rejected for _, rejected in results) > 0  # the starts did overlap
    assert not (tmp_path / "marker").exists()
