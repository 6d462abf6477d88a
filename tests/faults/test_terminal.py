"""Runs in a real terminal: lines whole and the cursor seen before, during, after, and after each kind of death."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.storage.layout import RUN_LOG
from tests.support.launching import small, write_sums
from tests.support.rank_scripts import RANK, alive, starts, wait_until
from tests.support.terminal import Terminal

# `supervise` with a script in the worker's place.
SUPERVISOR = """
import os, sys
from pathlib import Path
from rlhf.config.redaction import Redaction
from rlhf.config.resolved import load
from rlhf.launch.rank_output import RankOutput
from rlhf.launch.rank_starter import RankStarter
from rlhf.launch.stop_request import StopRequest
from rlhf.launch.supervisor import run_attempts
from rlhf.ranks.lock import run_lock, wait_for_ranks
from rlhf.ranks.logs import configure_logging
from rlhf.storage.layout import RUN_LOG
from rlhf.tracking.run_output import OutputHandler, RunOutput
config = load(Path(sys.argv[1]))
with RunOutput("auto", Redaction(os.environ)) as output:
    configure_logging(handler=OutputHandler(output))
    output.begin_bar()
    with RankOutput(output) as pipes, RankStarter(config, [], pipes) as starter, run_lock(config.run_dir):
        output.keep(config.run_dir / RUN_LOG)
        with StopRequest() as stop:
            code = run_attempts(config, [sys.argv[2], str(config.run_dir)], starter, stop)
sys.exit(code)
"""
# Rank 0 is at step 3 of 9; `stay` keeps both ranks there.
STEPS = """
from rlhf.ranks.progress_pipe import ProgressPipe
shown = ProgressPipe.of_environment()
peers_started()
if rank == 0:
    shown.start(2, 9)
    shown.update(3, {"reward/mean": 0.25, "val/accuracy": 0.375, "perf/tokens_per_second": 1234.5})
shown.phase(rank, 4, "generating", 20, 256)
status.event(4, "rollout.before")

def stay():
    while not flag.requested:
        time.sleep(0.05)
    sys.exit(75)
"""
AT_WORK = "generating 40/512"


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
    """Start ranks that run this script, under a supervisor in a terminal of so many columns."""
    started: list[Terminal] = []

    def run(columns: int, script: str) -> Terminal:
        rank, driver, yaml = (tmp_path / name for name in ("rank.py", "supervisor.py", "config.yaml"))
        rank.write_text(RANK + STEPS + script)
        driver.write_text(SUPERVISOR)
        yaml.write_text(to_yaml(config))
        # As a parent exports them that has imported readline: the size of another terminal, or of an earlier time.
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
    assert terminal.is_left_in_order, terminal.text
    assert b"\x1b[?25l" not in terminal.raw, "the cursor was hidden"
    glued = [line for line in terminal.lines if re.search(r".step +\d+/", line) or line.count("supervisor:") > 1]
    assert not glued, glued


@pytest.mark.parametrize(
    "columns", [pytest.param(60, marks=pytest.mark.slow), 80, pytest.param(200, marks=pytest.mark.slow)]
)
def test_a_crash_and_ctrl_c_twice_leave_lines_whole(config, start, columns):
    terminal = start(
        columns,
        """
if number == 1:
    print("to \\x1b[31mstdout\\x1b[0m \\x1b]0;title\\x07", flush=True)
    print("50%\\r100%\\nhalf a line", file=sys.stderr, end="", flush=True)
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(1)
""",
    )
    terminal.wait_for("Restart 1 of 10")
    wait_until(lambda: len(starts(config)) == 4, 60)
    terminal.wait_for(AT_WORK)
    assert terminal.bar.startswith("step 3/9 ━")
    assert AT_WORK in terminal.bar
    assert ("held-out accuracy 37.5%" in terminal.bar) == (columns == 200)
    assert len(terminal.bar) < columns
    assert_in_order(terminal)

    terminal.process.sendintr()
    terminal.wait_for("A second SIGTERM or Ctrl-C kills them")
    assert_in_order(terminal)
    time.sleep(1.1)
    terminal.process.sendintr()
    assert terminal.end() == EXIT_REQUEUE
    assert_in_order(terminal)
    assert terminal.shows("Asked a second time: the ranks were killed at once.")
    assert not terminal.shows("within trainer.preempt_grace_s=300")
    assert [line for line in terminal.lines if line.startswith("to stdout")] == ["to stdout \\x1b]0;title\\x07"] * 2
    assert {"100%", "half a line"} <= set(terminal.lines)
    assert sum("step 3/9" in line for line in terminal.lines) == 1, "one bar is left"

    log = (config.run_dir / RUN_LOG).read_text()
    assert "\x1b" not in log
    for text in ("Restart 1 of 10", "half a line\n", "step 3/9  reward 0.250", "Asked a second time"):
        assert text in log


def test_giving_up_leaves_the_evidence_below_the_bar(config, start):
    terminal = start(80, "sys.exit(3)")
    assert terminal.end() == EXIT_CRASHED
    assert_in_order(terminal)
    bar = next(i for i, line in enumerate(terminal.lines) if line.startswith("step 3/9"))
    assert any("The run ends: crashes in a row" in line for line in terminal.lines[bar:])


def test_a_killed_supervisor_leaves_the_cursor_below_the_bar(config, start):
    terminal = start(80, "stay()")
    terminal.wait_for(AT_WORK)
    os.kill(terminal.process.pid, signal.SIGKILL)
    assert terminal.end() == -signal.SIGKILL
    assert terminal.bar.startswith("step 3/9")
    assert_in_order(terminal)
    wait_until(lambda: not any(alive(pid) for _, pid in starts(config)), 10)


def test_a_run_whose_terminal_hangs_up_saves_and_leaves(config, start):
    terminal = start(80, "stay()")
    terminal.wait_for(AT_WORK)
    os.close(terminal.process.child_fd)
    terminal.process.closed = True
    wait_until(lambda: not alive(terminal.process.pid), 20)
    assert "SIGHUP: the ranks saved and left." in (config.run_dir / RUN_LOG).read_text()


def test_the_first_second(tmp_path):
    """A banner before anything heavy is imported; Ctrl-C right after it is one line."""
    arguments = small(tmp_path, "first", write_sums(tmp_path / "sums.jsonl"), "model=tiny")
    terminal = Terminal(80, tmp_path, "-m", "rlhf.train", "recipes=null", *arguments, HF_TOKEN="hf_secretsecret123")
    terminal.wait_for("first/run.log\nstarting")
    user, system = Path(f"/proc/{terminal.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    # Of the processor: the clock is that of a machine with other things to do.
    assert (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") < 1.0
    maps = Path(f"/proc/{terminal.process.pid}/maps").read_text()
    assert "torch" not in maps
    for text in ("no recipe: grpo", "tiny_policy (271K parameters)", " sums.jsonl (30)", "steps 7", "cpu, 1 rank"):
        assert terminal.shows(text)
    assert terminal.shows("run rlhf/first (new) log rlhf/first/run.log starting")
    terminal.process.sendintr()
    assert terminal.end() == 130
    assert_in_order(terminal)
    assert terminal.lines[-1] == "Interrupted before the training began."
    assert "Traceback" not in terminal.text
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
    refused = Terminal(60, tmp_path, "-m", "rlhf.train", "recipes=null", *arguments)
    assert refused.end() == EXIT_USER_ERROR
    assert_in_order(refused)
    assert refused.shows("Another run is writing into")
    assert not any(line.startswith("starting") for line in refused.lines), "the bar of a run that never began"
    first.read()
    assert (config.run_dir / RUN_LOG).read_bytes() == log
