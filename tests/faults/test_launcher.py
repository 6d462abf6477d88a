"""The launcher: when it must not fork, what ranks inherit, and what happens if it or its supervisor dies."""

import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, UserError
from rlhf.launch.local import starter as of_this_machine
from rlhf.ranks.launcher import fork_problem
from tests.support import rank_scripts
from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import ROOT, small, train
from tests.support.rank_scripts import RANK, SUPERVISOR, alive, local_starter, needs_of, starts, wait_until
from tests.support.refusals import says
from tests.support.undisturbed import EXPORT

UNSAFE = {
    "a_thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()",
        r"2 threads run in it \(",
    ),
    "a_group": (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "it is in a process group",
    ),
    "a_driver": ("kept = open(__file__.replace('a_driver.py', 'nvidia-uvm'), 'w')", "CUDA is initialized in it"),
    "a_context": ("import torch\ntorch.cuda._initialized = True", "CUDA is initialized in it"),
    "a_mistake": (
        "import no_such_module",
        r"it cannot import a_mistake \(ModuleNotFoundError: No module named 'no_such_module'\)",
    ),
}


@pytest.fixture
def config(tmp_path, monkeypatch, caplog) -> Config:
    caplog.set_level(logging.INFO, "rlhf")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    config = Config()
    config.model.path = "none"
    t = config.trainer
    t.default_local_dir, t.device, t.nproc, t.restart_backoff_s = str(tmp_path / "runs"), "cpu", 2, 0.0
    config.run_dir.mkdir(parents=True)
    return config


@pytest.fixture
def supervised(config, tmp_path):
    """Run the ranks' script under a supervisor in this process, with a launcher that imports `modules`. Return the
    exit code."""
    return lambda script, *modules: rank_scripts.supervised(config, tmp_path / "rank.py", RANK + script, modules)


def logged(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("rlhf")]


@pytest.mark.parametrize("module", UNSAFE)
def test_ranks_are_not_forked_after_unsafe_imports(config, supervised, tmp_path, caplog, module):
    source, reason = UNSAFE[module]
    (tmp_path / f"{module}.py").write_text(source)
    code = supervised('assert os.getppid() == supervisor and os.environ["WORLD_SIZE"] == "2"', module)
    assert code == EXIT_DONE
    assert len(starts(config)) == 2
    (line,) = logged(caplog)
    assert re.match(
        f"The ranks start as new processes, without a launcher: the launcher cannot fork the ranks, because {reason}",
        line,
    ), line


def test_what_ranks_import_starts_no_threads(config, supervised, monkeypatch):
    """NumPy's OpenBLAS must not start threads at its import in the launcher, although ranks use several threads."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    config.trainer.threads_per_rank = 2
    assert supervised("assert os.getppid() != supervisor", *needs_of(config).modules) == EXIT_DONE


def test_a_thread_started_after_the_import_prevents_the_fork(supervised, tmp_path, caplog):
    """The first attempt is forked. A later thread prevents the fork of the second."""
    (tmp_path / "late.py").write_text(
        "import os, signal, threading, time\n"
        "sleep = lambda *_: threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
        "signal.signal(signal.SIGUSR2, sleep)\n"
    )
    code = supervised(
        """
peers_started()
if number == 1:
    assert os.getppid() != supervisor
    rank == 0 and os.kill(os.getppid(), signal.SIGUSR2)
    while len(os.listdir(f"/proc/{os.getppid()}/task")) < 2:
        time.sleep(0.01)
    sys.exit(1)
assert os.getppid() == supervisor
""",
        "late",
    )
    assert code == EXIT_DONE
    assert "2 threads run in it" in logged(caplog)[-1]


def test_a_thread_that_ends_while_threads_are_counted_is_no_error():
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            threading.Thread(target=lambda: None).start()

    steady = threading.Thread(target=come_and_go)
    steady.start()
    try:
        assert all("threads run in it" in (fork_problem() or "") for _ in range(3000))
    finally:
        stop.set()
        steady.join()


def test_a_forked_rank_is_like_a_plain_one(config, supervised):
    """A forked rank has the files, signal handlers, variables and command line of a new process."""
    script = """
import json
if number == 1:
    links = [link for link in map(link_of, os.listdir("/proc/self/fd")) if not link.startswith("/proc/")]
    seen = {
        "argv": sys.argv,
        "main": __name__,
        "files": sorted(link.partition(":")[0] for link in links),
        "signals": {n.name: str(signal.getsignal(n)) for n in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGQUIT)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1),
        "hash": hash("a"),
        "leader": os.getsid(0) == os.getpid(),
        "variables": {
            k: v for k, v in os.environ.items() if k not in ("RLHF_PARENT_PID", "MASTER_PORT", "RLHF_STORE_FD")
        },
        "supervisor's": [m for m in sys.modules if m == "rlhf.launch" or m.startswith("rlhf.launch.")],
        "locks": [link for link in links if link.endswith("run.lock")],
    }
    (run_dir / f"seen_{rank}").write_text(json.dumps(seen))
"""
    define = """
def link_of(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
"""
    seen = {}
    for warm in (True, False):
        config.trainer.warm_start = warm
        (config.run_dir / "starts").unlink(missing_ok=True)
        assert supervised(define + script) == EXIT_DONE
        seen[warm] = [json.loads((config.run_dir / f"seen_{rank}").read_text()) for rank in (0, 1)]
    assert seen[True] == seen[False]
    assert seen[True][0]["supervisor's"] == seen[True][0]["locks"] == []


def test_twenty_restarts_leave_the_launcher_as_it_was(config, supervised):
    config.trainer.max_failures_per_step = config.trainer.max_restarts = 100
    code = supervised("""
pages = int(Path(f"/proc/{os.getppid()}/statm").read_text().split()[1])
if rank == 0:
    fds = len(os.listdir(f"/proc/{os.getppid()}/fd")), len(os.listdir("/proc/self/fd"))
    with (run_dir / "sizes").open("a") as sizes:
        sizes.write(f"{fds[0]} {fds[1]} {pages} {os.getppid()}\\n")
peers_started()
sys.exit(number <= 20)
""")
    assert code == EXIT_DONE
    sizes = [tuple(map(int, line.split())) for line in (config.run_dir / "sizes").read_text().splitlines()]
    assert len(sizes) == 21
    assert len({launcher for _, _, _, launcher in sizes}) == 1
    assert len({(fds, own) for fds, own, _, _ in sizes}) == 1, sizes
    assert sizes[-1][2] - sizes[1][2] < 256, "the launcher has grown by more than a megabyte"


def test_signals_to_the_whole_job_do_not_end_the_launcher(supervised):
    code = supervised("""
peers_started()
if rank == 0:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getppid(), number)
time.sleep(0.5)
""")
    assert code == EXIT_DONE


def test_an_ignored_signal_stays_ignored(supervised):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert supervised("assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN") == EXIT_DONE
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("warm", [True, False])
def test_a_crash_is_seen_under_a_parent_that_ignores_its_children(config, supervised, warm):
    config.trainer.warm_start = warm
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert supervised("sys.exit(number == 1)") == EXIT_DONE
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN, "the caller's handler must stay as it was"
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert len(starts(config)) > 2


def test_a_killed_launcher_is_a_crash_and_the_next_attempt_has_a_new_one(config, supervised, caplog):
    code = supervised("""
import subprocess
(run_dir / f"launcher_{number}").write_text(str(os.getppid()))
status.event(4, "update.before")
peers_started()
if number == 1 and rank == 0:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (run_dir / "child").write_text(str(child.pid))
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGKILL)
if number == 1:
    block()
""")
    assert code == EXIT_DONE
    assert len(starts(config)) == 4
    first, second = (int((config.run_dir / f"launcher_{number}").read_text()) for number in (1, 2))
    assert first != second
    assert logged(caplog) == [
        "Crash: the launcher: SIGKILL (often the kernel's out-of-memory killer), and its ranks died with it. "
        "Restart 1 of 10 in 0 s."
    ]
    wait_until(lambda: not alive(int((config.run_dir / "child").read_text())), 30)


def test_a_launcher_that_cannot_fork_says_so_and_leaves_no_rank(config, supervised, tmp_path, caplog):
    """The fork of the second rank fails, as when the user's limit of processes is reached."""
    (tmp_path / "full.py").write_text("""
import os
fork, left = os.fork, [1]
def limited():
    if not left:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    left.pop()
    return fork()
os.fork = limited
""")
    config.trainer.max_failures_per_step = 1
    assert supervised("block()", "full") == EXIT_CRASHED
    assert "rank 1: died with the launcher: exit code 1" in logged(caplog)[-1]
    wait_until(lambda: not any(alive(pid) for _, pid in starts(config)), 30)


def test_launcher_and_ranks_end_with_a_killed_supervisor(config, tmp_path):
    rank, driver, yaml = (tmp_path / name for name in ("rank.py", "supervisor.py", "config.yaml"))
    rank.write_text(RANK + 'if rank == 0:\n    (run_dir / "launcher").write_text(str(os.getppid()))\nblock()')
    driver.write_text(SUPERVISOR)
    yaml.write_text(to_yaml(config))
    with subprocess.Popen([sys.executable, driver, yaml, rank]) as supervisor:
        try:
            launcher = config.run_dir / "launcher"
            wait_until(lambda: len(starts(config)) == 2 and launcher.exists() and launcher.read_text(), 60)
            pids = [int(launcher.read_text()), *(pid for _, pid in starts(config))]
            assert supervisor.pid not in pids
            assert all(map(alive, pids))
        finally:
            supervisor.kill()
    wait_until(lambda: not any(map(alive, pids)), 30)


CHANGES = {
    "a module": ("(folder / 'versioned.py').write_text('VERSION = 22')", r"versioned\.py"),
    "a removed module": ("os.rename(folder / 'versioned.py', folder / 'site-packages/versioned.py')", r"versioned\.py"),
    "an upgrade": ("os.rename(installed, installed.with_name('tool-2.0.dist-info'))", r"tool-\d\.0\.dist-info"),
    "an upgrade to the same version": ("installed.rmdir(); installed.mkdir()", r"tool-1\.0\.dist-info"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_code_update_all_ranks_import_the_new_code(config, supervised, tmp_path, monkeypatch, caplog, change):
    """After an update during a run, the ranks of the next attempt import everything anew, and a crash counts once."""
    action, path = CHANGES[change]
    (tmp_path / "versioned.py").write_text("VERSION = 1")
    (tmp_path / "site-packages" / "tool-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}:{tmp_path / 'site-packages'}")
    code = supervised(
        f"""
peers_started()
if number == 1:
    assert os.getppid() != supervisor
    if rank == 0:
        folder = Path(__file__).parent
        installed = folder / "site-packages" / "tool-1.0.dist-info"
        {action}
    sys.exit(1)
import versioned
(run_dir / f"seen_{{rank}}").write_text(f"{{versioned.VERSION}} {{os.getppid() == supervisor}}")
""",
        "versioned",
    )
    assert code == EXIT_DONE
    seen = [(config.run_dir / f"seen_{rank}").read_text() for rank in (0, 1)]
    assert seen == [f"{22 if change == 'a module' else 1} True"] * 2
    crash, line = logged(caplog)
    assert re.match(r"Crash: rank [01]: exit code 1", crash)
    assert re.search(f"start as new processes.*{tmp_path}/.*{path} has changed", line), line


def test_an_update_during_the_imports_is_noticed(config, supervised, tmp_path, monkeypatch, caplog):
    installed = tmp_path / "site-packages" / "tool-1.0.dist-info"
    installed.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}:{installed.parent}")
    (tmp_path / "upgraded.py").write_text(f"from pathlib import Path\nPath({str(installed)!r}).rmdir()")
    assert supervised("assert os.getppid() == supervisor", "upgraded") == EXIT_DONE
    says(logged(caplog)[0], str(installed), "has changed")


STOP_THE_LAUNCHER = """
peers_started()
if rank == 0 and number == 1:
    os.kill(os.getppid(), signal.SIGSTOP)
    while Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
peers_passed("stopped")
"""


def test_a_run_whose_launcher_is_stopped_ends_normally(config, supervised, caplog):
    config.trainer.watchdog_first_timeout_s = 30.0
    assert supervised(STOP_THE_LAUNCHER) == EXIT_DONE
    assert logged(caplog) == []
    assert len(starts(config)) == 2


def test_a_crash_under_a_stopped_launcher_is_followed_by_new_processes(config, supervised, caplog):
    config.trainer.watchdog_first_timeout_s, config.trainer.watchdog = 600.0, False
    begin = time.monotonic()
    code = supervised(
        STOP_THE_LAUNCHER + "number == 1 and (os._exit(3) if rank else block())\nassert os.getppid() == supervisor"
    )
    assert code == EXIT_DONE
    crash, line = logged(caplog)
    assert "rank 1: exit code 3" in crash
    says(line, "new processes", "stopped")
    assert time.monotonic() - begin < 300


def test_a_launcher_stopped_before_the_ranks_start_is_abandoned(config, supervised, tmp_path, caplog):
    (tmp_path / "stopping.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")
    config.trainer.watchdog_first_timeout_s, config.trainer.watchdog = 600.0, False
    begin = time.monotonic()
    assert supervised("assert os.getppid() == supervisor", "stopping") == EXIT_DONE
    says(logged(caplog)[0], "new processes", "stopped")
    assert time.monotonic() - begin < 300


def test_a_launcher_that_was_paused_forks_the_next_attempt(config, supervised, caplog):
    """A stopped launcher reports the ends of ranks late, and the next attempt is forked."""
    code = supervised(
        STOP_THE_LAUNCHER
        + """
assert os.getppid() != supervisor
if number == 1 and rank == 0:
    import subprocess
    subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getppid()}"], start_new_session=True)
    os._exit(1)
if number == 1:
    time.sleep(100)
"""
    )
    assert code == EXIT_DONE
    assert len(logged(caplog)) == 1
    assert len(starts(config)) == 4


def test_a_request_to_stop_does_not_wait_for_imports(config, supervised, tmp_path, caplog):
    source = "import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)"
    (tmp_path / "slow_import.py").write_text(source)
    begin = time.monotonic()
    assert supervised("", "slow_import") == EXIT_REQUEUE
    assert time.monotonic() - begin < 60
    assert starts(config) == []
    assert logged(caplog) == ["SIGTERM while no rank was training. The same command starts the run again."]


def test_imports_that_hang_are_left_to_the_ranks(config, supervised, tmp_path, caplog):
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(600)")
    config.trainer.watchdog_first_timeout_s = 1.0
    config.trainer.watchdog = False  # the ranks may take longer
    assert supervised("assert os.getppid() == supervisor", "hanging") == EXIT_DONE
    assert "its imports took more than trainer.watchdog_first_timeout_s=1" in logged(caplog)[0]


@pytest.mark.parametrize(
    ("count", "message"),
    [
        ("print(3)", "only 3 CUDA devices are visible"),
        ("import time; time.sleep(600)", "Counting the CUDA devices took more than"),
    ],
)
def test_counting_the_devices_has_a_deadline(config, tmp_path, monkeypatch, count, message):
    """The imports of the launcher hang, or CUDA hangs."""
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setattr(of_this_machine, "_COUNT_GPUS", count)
    t = config.trainer
    t.device, t.nproc, t.watchdog_first_timeout_s = "cuda", 4, 2.0
    with local_starter(config, ["hanging"]) as starter, pytest.raises(UserError, match=message):
        starter.check_devices()


def test_devices_are_counted_by_a_process_of_their_own(config):
    config.trainer.device = "cuda"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    config.trainer.nproc = count + 1
    for warm in (True, False):
        config.trainer.warm_start = warm
        with local_starter(config, []) as starter, pytest.raises(UserError, match=r"CUDA devices? (is|are) visible"):
            starter.check_devices()


def test_gpus_of_the_driver_that_torch_does_not_find_are_told(config, monkeypatch):
    monkeypatch.setattr(of_this_machine, "_COUNT_GPUS", "print(0)")
    config.trainer.device, config.trainer.warm_start = "auto", False
    with local_starter(config, []) as starter:
        starter.check_devices()
        monkeypatch.setattr("rlhf.planning.devices.count_gpus", lambda: 1)
        with pytest.raises(UserError, match=r"trainer\.device=auto, but no CUDA device is visible"):
            starter.check_devices()


def test_which_runs_are_forked_and_what_they_import_before():
    config = Config()
    assert needs_of(config).no_fork_reason is None
    assert needs_of(config).modules == ["rlhf.worker", "reasoning_gym"]
    config.data.train_files, config.backend.name, config.trainer.device = "sums.jsonl", "deepspeed", "cpu"
    assert needs_of(config).modules == ["rlhf.worker", "torch._inductor.compile_fx", "deepspeed"]
    config.rollout.name = "vllm"
    assert "rollout.name=vllm" in needs_of(config).no_fork_reason


def test_no_rank_imports_of_the_parents_side_and_the_parent_no_torch():
    worker = "import sys, rlhf.worker; print([m for m in sys.modules if m.split('.')[:2] == ['rlhf', 'launch']])"
    parent = "import sys, rlhf.launch.supervisor; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    for program in (worker, parent):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"


def test_a_run_from_start_to_end_loads_no_torch_into_its_supervisor(tmp_path, sums):
    program = """
import sys
started = []
sys.addaudithook(lambda event, arguments: event == "subprocess.Popen" and started.append(arguments))
from rlhf.train import main
code = main(sys.argv[1:])
print(any("rlhf.ranks.launcher" in map(str, arguments[1]) for arguments in started))
sys.exit(code or 10 * ("torch" in sys.modules))
"""
    command = [*small(tmp_path, "light", sums), "trainer.total_training_steps=1", "actor.optim.lr_warmup_steps=0"]
    for launches in (True, False):  # first the run trains; then it is finished, so no process loads torch
        done = subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == EXIT_DONE, done.stderr
        assert done.stdout.splitlines()[-1] == str(launches)


@pytest.mark.slow
def test_plain_ranks_and_a_killed_launcher_give_the_same_run(tmp_path, undisturbed, launches, sums):
    """Forked ranks, ranks as new processes, and forked ranks whose launcher is killed have the same bits, generators
    included."""
    killed = at("update.before", 5, "SIGKILL", to="launcher", rank=1, once=tmp_path / "hit")
    runs = {
        "plain": (["trainer.warm_start=false", "trainer.nproc=1"], {}, 1),
        "killed": (["trainer.nproc=2"], killed, 2),
    }
    ends = {
        name: launches.submit(train, [*small(tmp_path, name, sums), EXPORT, *more], environment)
        for name, (more, environment, _) in runs.items()
    }
    for name, (_, _, nproc) in runs.items():
        end = ends[name].result()
        assert end.code == EXIT_DONE, end.output
        assert differences(undisturbed.run_dir(nproc), tmp_path / "rlhf" / name) == []
    assert (tmp_path / "hit").exists()
    assert "Crash: the launcher: SIGKILL" in ends["killed"].result().output
    assert (
        "The ranks start as new processes, without a launcher: trainer.warm_start=false."
        in ends["plain"].result().output
    )
