"""Runs in a real terminal: whole lines and a visible cursor before, during and after a run, and after each kind of
death."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.storage.layout import RUN_LOG
from tests.support.launching import policy_that_blocks_loading, small, write_sums
from tests.support.rank_scripts import RANK, alive, starts, wait_until
from tests.support.terminal import ROOT, Terminal

# `supervise` with a script instead of the worker.
SUPERVISOR = """
import os, sys
from pathlib import Path
from rlhf.config.redaction import Redaction
from rlhf.config.resolved import load
from rlhf.launch.local.rank_output import RankOutput
from rlhf.launch.stop_request import StopRequest
from rlhf.launch.supervisor import run_attempts
from rlhf.ranks.lock import run_lock, wait_for_ranks
from rlhf.ranks.logs import configure_logging
from rlhf.storage.layout import RUN_LOG
from rlhf.tracking.run_output import OutputHandler, RunOutput
from tests.support.rank_scripts import local_starter
config = load(Path(sys.argv[1]))
with RunOutput("auto", Redaction(os.environ)) as output:
    configure_logging(handler=OutputHandler(output))
    output.begin_bar()
    with RankOutput(output) as pipes, local_starter(config, [], pipes) as starter, run_lock(config.run_dir):
        output.open_log(config.run_dir / RUN_LOG)
        with StopRequest() as stop:
            code = run_attempts(config, [sys.argv[2], str(config.run_dir)], starter, stop)
sys.exit(code)
"""
# LOADING: a rank that loads its weights. STEPS: rank 0 is at step 3 of 9, and `stay` keeps both ranks there. The text
# that a test waits for is drawn last.
LOADING = """
from rlhf.ranks.progress_pipe import ProgressPipe
ProgressPipe.from_environment().phase(rank, 0, "loading the weights", 0, 0)
block()
"""
STEPS = """
from rlhf.ranks.progress_pipe import ProgressPipe
shown = ProgressPipe.from_environment()
peers_started()
status.event(4, "rollout.before")
if rank == 0:
    shown.start(2, 9)
    shown.update(3, {"reward/mean": 0.25, "val/accuracy": 0.375, "perf/tokens_per_second": 1234.5})
shown.phase(rank, 4, "generating", 20 * number, 256)

def stay():
    while not flag.requested:
        time.sleep(0.05)
    sys.exit(75)
"""
AT_WORK, AGAIN = "generating 40/512", "generating 80/512"
WIDTHS = [pytest.param(60, marks=pytest.mark.slow), 80, pytest.param(200, marks=pytest.mark.slow)]


@pytest.fixture
def config(tmp_path) -> Config:
    config = Config()
    config.model.path = "none"
    t = config.trainer
    t.default_local_dir, t.device, t.nproc = str(tmp_path / "runs"), "cpu", 2
    t.restart_backoff_s, t.max_failures_per_step = 0.01, 2
    config.run_dir.mkdir(parents=True)
    return config


@pytest.fixture
def start(config, tmp_path) -> Iterator:
    """Start ranks that run this script, under a supervisor in a terminal of `columns` columns."""
    started: list[Terminal] = []

    def run(columns: int, script: str, before: str = STEPS) -> Terminal:
        rank, driver, yaml = (tmp_path / name for name in ("rank.py", "supervisor.py", "config.yaml"))
        rank.write_text(RANK + before + script)
        driver.write_text(SUPERVISOR)
        yaml.write_text(to_yaml(config))
        # A parent that has imported readline exports the size of another terminal, or an old size.
        stale = {"COLUMNS": "99", "LINES": "24"}
        started.append(Terminal(columns, tmp_path, driver, yaml, rank, **stale))
        return started[-1]

    yield run
    for terminal in started:
        if not terminal.process.closed:
            terminal.process.close(force=True)
    for _, pid in starts(config):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def assert_in_order(terminal: Terminal) -> None:
    end = time.monotonic() + 30
    while not terminal.is_left_in_order and time.monotonic() < end and terminal.read():
        pass  # read until the screen is drawn completely
    assert terminal.is_left_in_order, terminal.text
    assert b"\x1b[?25l" not in terminal.raw, "the cursor was hidden"
    glued = [line for line in terminal.lines if re.search(r".step +\d+/", line) or line.count("supervisor:") > 1]
    assert not glued, glued


def kill(number: int) -> Callable[[Terminal], None]:
    return lambda terminal: os.kill(terminal.process.pid, number)


@dataclass(frozen=True)
class Death:
    """How the run is ended, by the ranks' `script` or by `act`, and its expected exit code and message."""

    script: str
    code: int
    message: str
    act: Callable[[Terminal], object] = lambda terminal: None
    shows: str = ""
    """The text on the screen before `act`."""
    before: str = STEPS


# Rank 1 waits for the end of rank 0, so that rank 0 is not killed before it has shown its bar.
LAST = "rank == 0 or peers_ended()\n"
DEATHS = {
    "giving up": Death(f"{LAST}sys.exit(3)", EXIT_CRASHED, "The run ends: crashes in a row"),
    "a mistake": Death(
        f'{LAST}status.error("user", "a=b: fix it."); sys.exit(2)', EXIT_USER_ERROR, "supervisor: error: a=b: fix it."
    ),
    "kill -9": Death("stay()", -signal.SIGKILL, "", kill(signal.SIGKILL), AT_WORK),
    "SIGTERM": Death("stay()", EXIT_REQUEUE, "SIGTERM: the ranks saved and left.", kill(signal.SIGTERM), AT_WORK),
    "Ctrl-C while loading": Death(
        "",
        EXIT_REQUEUE,
        "SIGINT while no rank was training. The same command starts the run again.",
        lambda terminal: terminal.process.sendintr(),
        "loading the weights",
        LOADING,
    ),
}


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS.keys())
def test_each_kind_of_end_leaves_whole_lines(config, start, columns, death):
    terminal = start(columns, death.script, death.before)
    if death.shows:
        terminal.wait_for(death.shows)
        assert_in_order(terminal)
    death.act(terminal)
    assert terminal.end() == death.code, terminal.text
    assert_in_order(terminal)
    bars = [i for i, line in enumerate(terminal.lines) if "step 3/9" in line]
    assert len(bars) == (death.before == STEPS), "one bar must be left, or none if the run reached no step"
    assert all(terminal.lines[i].startswith("step 3/9 ━") and len(terminal.lines[i]) < columns for i in bars)
    below = "".join(terminal.lines[bars[0] + 1 if bars else 0 :])
    assert death.message.replace(" ", "") in below.replace(" ", ""), terminal.text
    assert not any(line.startswith("loading the weights") for line in terminal.lines)
    wait_until(lambda: not any(alive(pid) for _, pid in starts(config)), 60)


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_crash_and_ctrl_c_twice_leave_lines_whole(config, start, columns):
    terminal = start(
        columns,
        """
if number == 1:
    print("to \\x1b[31mstdout\\x1b[0m \\x1b]0;title\\x07", flush=True)
    print("50%\\r100%\\nhalf a line", file=sys.stderr, end="", flush=True)
    peers_passed("printed")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(1)
""",
    )
    terminal.wait_for("Restart 1 of 10")
    terminal.wait_for(AGAIN)
    assert_in_order(terminal)
    assert terminal.bar.startswith("step 3/9 ━")
    assert AGAIN in terminal.bar
    assert ("held-out accuracy 37.5%" in terminal.bar) == (columns == 200)
    assert len(terminal.bar) < columns

    terminal.process.sendintr()
    terminal.wait_for("A second SIGTERM or Ctrl-C kills them")
    assert_in_order(terminal)
    time.sleep(1.1)
    terminal.process.sendintr()
    assert terminal.end() == EXIT_REQUEUE
    assert_in_order(terminal)
    assert terminal.shows("Second stop signal: the ranks were killed at once.")
    assert not terminal.shows("within trainer.preempt_grace_s=300")
    assert [line for line in terminal.lines if line.startswith("to stdout")] == ["to stdout \\x1b]0;title\\x07"] * 2
    assert {"100%", "half a line"} <= set(terminal.lines)
    assert sum("step 3/9" in line for line in terminal.lines) == 1, "one bar is left"

    log = (config.run_dir / RUN_LOG).read_text()
    assert "\x1b" not in log
    for text in ("Restart 1 of 10", "half a line\n", "step 3/9  reward 0.250", "Second stop signal"):
        assert text in log


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_run_whose_terminal_hangs_up_saves_and_leaves(config, start, columns):
    terminal = start(columns, "stay()")
    terminal.wait_for(AT_WORK)
    assert_in_order(terminal)
    os.close(terminal.process.child_fd)
    terminal.process.closed = True
    wait_until(lambda: not alive(terminal.process.pid), 60)
    assert "SIGHUP: the ranks saved and left." in (config.run_dir / RUN_LOG).read_text()


def test_a_run_with_a_full_output_pipe_saves_and_exits(config, tmp_path):
    """A paused `| less`: the pipe is full when SIGTERM arrives."""
    reader, pipe = os.pipe()
    script = """
for i in range(3000):
    print(i, "x" * 90, file=sys.stderr, flush=True)
(run_dir / f"printed_{rank}").touch()
stay()
"""
    shorter = "from rlhf.tracking import unread_output\nunread_output.READER_TIMEOUT_S = 1.0\n"
    rank, driver, yaml = (tmp_path / name for name in ("rank.py", "supervisor.py", "config.yaml"))
    rank.write_text(RANK + STEPS + script)
    driver.write_text(shorter + SUPERVISOR)
    yaml.write_text(to_yaml(config))
    with subprocess.Popen(
        [sys.executable, driver, yaml, rank], stderr=pipe, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as process:
        try:
            wait_until(lambda: len(list(config.run_dir.glob("printed_*"))) == 2, 60)
            process.terminate()
            assert process.wait(60) == EXIT_REQUEUE
        finally:
            process.kill()
            os.close(pipe)
            os.close(reader)
    log = (config.run_dir / RUN_LOG).read_text()
    assert "The output of this command has not been read" in log
    assert "SIGTERM: the ranks saved and left." in log


@pytest.fixture(scope="module")
def torch_import_s() -> float:
    """Return the processor seconds of `import torch` on this machine."""
    code = "import time, torch; print(time.process_time())"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_banner_appears_before_heavy_imports(tmp_path, columns, torch_import_s):
    """The banner appears before heavy imports. Ctrl-C after it prints one line."""
    model = policy_that_blocks_loading(tmp_path / "tiny_policy")
    arguments = small(tmp_path, "first", write_sums(tmp_path / "sums.jsonl"), f"model.path={model}")
    secret = {"HF_TOKEN": "hf_secretsecret123"}
    terminal = Terminal(columns, tmp_path, "-m", "rlhf.train", "recipes=null", *arguments, **secret)
    terminal.wait_for("first/run.log\nstarting")
    user, system = Path(f"/proc/{terminal.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    # The start is measured in processor seconds and compared with the import of torch, because load and speed of
    # machines vary. It takes about half as long as the import.
    assert (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") < torch_import_s
    maps = Path(f"/proc/{terminal.process.pid}/maps").read_text()
    assert "torch" not in maps
    prompts = " sums.jsonl (30 in the file)"
    for text in ("no recipe: grpo", "tiny_policy (271K parameters)", prompts, "steps 7", "cpu, 1 rank"):
        assert terminal.shows(text)
    assert terminal.shows("run rlhf/first (new) log rlhf/first/run.log starting")
    terminal.process.sendintr()
    assert terminal.end() == EXIT_REQUEUE
    assert_in_order(terminal)
    expected = "SIGINT while no rank was training. The same command starts the run again."
    assert "".join(terminal.lines).count("SIGINT") == 1
    # A line may end with the space where it breaks; on the screen, this looks like an empty cell.
    assert "".join("".join(terminal.lines).split()).endswith("".join(expected.split()))
    assert not (tmp_path / "rlhf" / "first" / RUN_LOG).exists()


@pytest.mark.slow
def test_a_whole_run_in_a_terminal_and_again(tmp_path):
    arguments = small(tmp_path, "whole", write_sums(tmp_path / "sums.jsonl"), "model=tiny", "trainer.seed=3")
    command = ["-m", "rlhf.train", "recipes=null", *arguments]
    terminal = Terminal(80, tmp_path, *command)
    seen: set[str] = set()
    while terminal.read():
        if terminal.bar.startswith("step"):
            seen.add(terminal.bar)
            terminal.resize(60 if len(seen) % 2 else 200)
    assert terminal.end() == EXIT_DONE
    assert_in_order(terminal)
    assert any("step 7/7" in line for line in terminal.lines)
    run_dir = tmp_path / "rlhf" / "whole"
    first = (run_dir / RUN_LOG).read_text()
    for phase in ("starting", "loading the weights", "step 1/7  generating", "step 1/7  actor update"):
        assert f" {phase}" in first
    assert " step 7/7  reward" in first
    assert len(first.splitlines()) < 80, "no line for each token"

    again = Terminal(80, tmp_path, *command)
    again.wait_for("(finished at step 7)")
    assert again.end() == EXIT_DONE
    assert_in_order(again)
    log = (run_dir / RUN_LOG).read_text()
    assert log.startswith(first)
    assert "is finished at step 7" in log.removeprefix(first)


def test_a_refused_launch_writes_no_line_into_the_log_of_the_run(config, tmp_path, start):
    first = start(80, "stay()")
    first.wait_for(AT_WORK)
    log = (config.run_dir / RUN_LOG).read_bytes()
    arguments = small(tmp_path / "runs", "default", write_sums(tmp_path / "sums.jsonl"), "model=tiny")
    rejected = Terminal(60, tmp_path, "-m", "rlhf.train", "recipes=null", *arguments)
    assert rejected.end() == EXIT_USER_ERROR
    assert_in_order(rejected)
    assert rejected.shows("Another run is writing into")
    assert not any(line.startswith("starting") for line in rejected.lines), "a rejected start must show no bar"
    first.read()
    assert (config.run_dir / RUN_LOG).read_bytes() == log
