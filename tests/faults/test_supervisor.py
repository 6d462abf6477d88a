"""The supervisor with real ranks that crash, hang, are killed or preempted. Small scripts replace the worker.

Each test runs twice: with forked ranks and with ranks as new processes.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, UserError
from rlhf.launch import attempt as attempt_module
from rlhf.launch.local.starter import LocalStarter
from rlhf.launch.supervisor import supervise
from rlhf.ranks.lock import run_lock, wait_for_ranks
from tests.support import rank_scripts
from tests.support.rank_scripts import RANK, SUPERVISOR, alive, starts, wait_until


@pytest.fixture(params=[True, False], ids=["warm", "plain"])
def config(tmp_path, monkeypatch, request) -> Config:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the scripts are outside the checkout
    config = Config()
    config.model.path = "none"
    t = config.trainer
    t.default_local_dir, t.device, t.nproc = str(tmp_path / "runs"), "cpu", 2
    t.warm_start = request.param
    t.restart_backoff_s, t.max_failures_per_step = 0.01, 2
    config.run_dir.mkdir(parents=True)
    return config


@pytest.fixture
def supervised(config, tmp_path):
    """Run the ranks' script under a supervisor in this process. Return the exit code."""
    return lambda script: rank_scripts.supervised(config, tmp_path / "rank.py", RANK + script)


@pytest.fixture
def start(config, tmp_path):
    """Start a supervisor process and wait until all its ranks run. Return the process and the ranks' process ids."""
    started = []

    def run(script: str) -> tuple[subprocess.Popen, list[int]]:
        rank, driver, yaml, output = (tmp_path / name for name in ("rank.py", "supervisor.py", "config.yaml", "output"))
        rank.write_text(RANK + script)
        driver.write_text(SUPERVISOR)
        yaml.write_text(to_yaml(config))
        with output.open("w") as stderr:
            process = subprocess.Popen([sys.executable, driver, yaml, rank], stderr=stderr)
        started.append(process)
        wait_until(lambda: len(starts(config)) == config.trainer.nproc or process.poll() is not None, 60)
        assert process.poll() is None, output.read_text()
        return process, [pid for _, pid in starts(config)]

    yield run
    for process in started:
        process.kill()
        process.wait()
    for _, pid in starts(config):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_all_ranks_end_well_with_their_environment(config, supervised):
    config.trainer.threads_per_rank = 3
    code = supervised("""
assert os.environ["WORLD_SIZE"] == "2" and os.environ["LOCAL_RANK"] == str(rank)
assert os.environ["OMP_NUM_THREADS"] == "3" and os.environ["TOKENIZERS_PARALLELISM"] == "false"
assert os.getppid() == int(os.environ["RLHF_PARENT_PID"])
assert os.getpgrp() == os.getsid(0) == os.getpid()
assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
time.sleep(0.5 * rank)  # a rank that ends early doesn't end the other rank
(run_dir / f"whole_{rank}").touch()
""")
    assert code == EXIT_DONE
    assert [rank for rank, _ in sorted(starts(config))] == [0, 1]
    assert len(list(config.run_dir.glob("whole_*"))) == 2
    assert "RLHF_SUPERVISOR_PID" not in os.environ


def test_restart_after_sigkill_of_one_rank_says_what_died_where(config, supervised, caplog, monkeypatch):
    monkeypatch.setattr(attempt_module, "PEER_GRACE_S", 0.5)
    begin = time.monotonic()
    code = supervised("""
status.event(number, "rollout.before")
peers_started()
if number == 1 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if number == 1:
    block()
""")
    assert code == EXIT_DONE
    assert len(starts(config)) == 4
    assert time.monotonic() - begin < 60  # the supervisor does not wait for the end of rank 0's sleep
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("rlhf")]
    assert warnings == [
        "Crash: rank 1: SIGKILL (often the kernel's out-of-memory killer), at step 1, last event rollout.before. "
        "Restart 1 of 10 in 0.01 s."
    ]


def test_children_of_a_dead_rank_die_with_it(config, supervised):
    config.trainer.nproc, config.trainer.max_restarts = 1, 0
    code = supervised("""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
(run_dir / "child").write_text(str(child.pid))
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert code == EXIT_CRASHED
    wait_until(lambda: not alive(int((config.run_dir / "child").read_text())), 30)


def test_crash_loop_ends_with_the_evidence(config, supervised, caplog):
    (config.run_dir / "global_step_6").mkdir()
    code = supervised("""
import traceback
peers_started()
status.event(7, "update.before")
if rank == 1:
    try:
        raise RuntimeError("the loss is not finite")
    except RuntimeError as error:
        status.error("crash", f"RuntimeError: {error}", traceback.format_exc())
        sys.exit(1)
peers_ended()
sys.exit(3)
""")
    assert code == EXIT_CRASHED
    assert len(starts(config)) == 4
    text = caplog.records[-1].getMessage()
    assert text.startswith("The run ends: crashes in a row at step 7: 2 (trainer.max_failures_per_step=2).")
    assert "rank 0: exit code 3, at step 7, last event update.before" in text
    assert "rank 1: exit code 1, at step 7, last event update.before  (the first to fail)" in text
    assert "rank 1's error: RuntimeError: the loss is not finite" in text
    assert 'raise RuntimeError("the loss is not finite")' in text
    assert f"continues from {config.run_dir / 'global_step_6'}" in text


def test_progress_renews_the_budget(config, supervised):
    config.trainer.nproc, config.trainer.max_restarts = 1, 1
    code = supervised("""
status.event(number, "update.before")
sys.exit(0 if number == 4 else 1)
""")
    assert code == EXIT_DONE
    assert len(starts(config)) == 4


def test_user_error_of_one_rank_ends_the_run_at_once(config, supervised, caplog, monkeypatch):
    monkeypatch.setattr(attempt_module, "PEER_GRACE_S", 0.3)
    code = supervised("""
peers_started()
if rank == 1:
    status.error("user", "model.path=none: no such folder; name one.")
    sys.exit(2)
block()
""")
    assert code == EXIT_USER_ERROR
    assert len(starts(config)) == 2
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("rlhf")] == [
        "model.path=none: no such folder; name one."
    ]


def test_ranks_that_a_scheduler_signals_directly_are_requeued(config, supervised):
    code = supervised("""
peers_started()
os.kill(os.getpid(), signal.SIGTERM)
assert flag.requested
time.sleep(0.5 * rank)  # the other rank is still saving when the first has left
(run_dir / f"saved_{rank}").touch()
sys.exit(75)
""")
    assert code == EXIT_REQUEUE
    assert len(starts(config)) == 2
    assert len(list(config.run_dir.glob("saved_*"))) == 2


def test_signal_to_the_supervisor_saves_and_requeues(config, supervised, caplog):
    caplog.set_level(logging.INFO, "rlhf")
    code = supervised("""
status.event(3, "rollout.before")
peers_passed("training")
if rank == 0:
    os.kill(supervisor, signal.SIGTERM)
while not flag.requested:
    time.sleep(0.02)
time.sleep(0.3 * rank)
(run_dir / f"saved_{rank}").touch()
sys.exit(75)
""")
    assert code == EXIT_REQUEUE
    assert len(list(config.run_dir.glob("saved_*"))) == 2
    assert len(starts(config)) == 2
    assert "SIGTERM: the ranks saved and left" in caplog.records[-1].getMessage()


def test_a_stop_request_before_the_first_step_ends_at_once(config, supervised, caplog):
    """While weights load, which may take minutes, there is nothing to save."""
    caplog.set_level(logging.INFO, "rlhf")
    begin = time.monotonic()
    code = supervised("""
peers_started()
if rank == 0:
    os.kill(supervisor, signal.SIGTERM)
block()
""")
    assert code == EXIT_REQUEUE
    assert time.monotonic() - begin < 60
    assert not any(alive(pid) for _, pid in starts(config))
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("rlhf")]
    assert logged[-1] == "SIGTERM while no rank was training. The same command starts the run again."
    assert len(logged) == 1 + (not config.trainer.warm_start), logged


def test_ranks_that_left_without_saving_are_not_reported_as_saved(config, supervised, caplog):
    code = supervised("""
peers_started()
status.error("unsaved", "left without saving step 3")
sys.exit(75)
""")
    assert code == EXIT_REQUEUE
    assert caplog.records[-1].getMessage() == "left without saving step 3"
    assert caplog.records[-1].levelno == logging.ERROR


def test_ranks_are_killed_after_the_grace_period(config, supervised, caplog):
    config.trainer.preempt_grace_s = 1.0
    code = supervised("""
status.event(3, "rollout.before")
peers_passed("training")
if rank == 0:
    (run_dir / "asked").touch()
    os.kill(supervisor, signal.SIGTERM)
block()
""")
    grace = time.time() - (config.run_dir / "asked").stat().st_mtime
    assert code == EXIT_REQUEUE
    assert 1.0 <= grace < 60
    text = caplog.records[-1].getMessage()
    assert "trainer.preempt_grace_s=1. Only the work since the last checkpoint is lost." in text
    assert "rank 1: killed by the supervisor, at step 3, last event rollout.before" in text
    assert not any(alive(pid) for _, pid in starts(config))


def test_a_second_sigterm_kills_at_once(config, supervised):
    code = supervised("""
status.event(3, "rollout.before")
peers_passed("training")
if rank == 0:
    os.kill(supervisor, signal.SIGTERM)
    while not flag.requested:  # not before the supervisor has heard the first
        time.sleep(0.02)
    time.sleep(1.2)
    (run_dir / "still_here").touch()
    os.kill(supervisor, signal.SIGTERM)
block()
""")
    assert code == EXIT_REQUEUE
    assert (config.run_dir / "still_here").exists()
    assert not any(alive(pid) for _, pid in starts(config))


def test_a_signal_while_waiting_for_a_restart_leaves_at_once(config, supervised, caplog):
    config.trainer.nproc, config.trainer.restart_backoff_s = 1, 60.0

    class OnceItWaits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Restart 1 of 10 in 60 s" in record.getMessage():
                os.kill(os.getpid(), signal.SIGTERM)

    handler = OnceItWaits()
    logging.getLogger("rlhf").addHandler(handler)
    begin = time.monotonic()
    try:
        assert supervised("sys.exit(1)") == EXIT_REQUEUE
    finally:
        logging.getLogger("rlhf").removeHandler(handler)
    assert time.monotonic() - begin < 45
    assert len(starts(config)) == 1
    assert caplog.records[-1].getMessage().startswith("SIGTERM while no rank was training.")


def test_a_killed_supervisor_takes_its_ranks_along_and_frees_the_directory(config, start):
    supervisor, ranks = start("block()")
    with pytest.raises(UserError, match=f"{config.run_dir}: process {supervisor.pid} on"):
        supervise(config, lambda: None)
    assert all(map(alive, ranks))
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not any(map(alive, ranks)), 30)
    wait_for_ranks(config.run_dir, deadline_s=30)
    with run_lock(config.run_dir):
        pass


def test_more_ranks_than_devices_or_an_unwritable_folder_is_rejected(config, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStarter, "_device_count", lambda _: 1)
    config.trainer.device = "cuda"
    with pytest.raises(UserError, match=r"trainer\.nproc=2, but only 1 CUDA"):
        supervise(config, lambda: None)
    (tmp_path / "file").touch()
    config.trainer.default_local_dir = str(tmp_path / "file")
    with pytest.raises(UserError, match=r"trainer\.default_local_dir"):
        supervise(config, lambda: None)


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another user here, who may not read all")
@pytest.mark.parametrize("config", [False], indirect=True)
@pytest.mark.parametrize("closed", ["..", ".", "run.json", "global_step_1/manifest.json"])
def test_a_directory_that_may_not_be_read_is_refused(config, closed):
    with tempfile.TemporaryDirectory() as folder:  # only root can enter pytest's folders
        Path(folder).chmod(0o755)
        config.trainer.default_local_dir = folder
        (config.run_dir / "global_step_1").mkdir(parents=True)
        for name in ("run.json", "global_step_1/manifest.json"):
            (config.run_dir / name).write_text('{"run_id": "x"}')
        (config.run_dir / closed).chmod(0)
        os.seteuid(65534)
        try:
            with pytest.raises(UserError, match=rf"Cannot read.*{config.run_dir}.*trainer\.default_local_dir"):
                supervise(config, lambda: None)
        finally:
            os.seteuid(0)
