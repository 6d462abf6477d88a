"""Parallel stages of .ci/run: outputs are separate, no stage runs if one that it needs has failed, and no process or
file is left behind."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.launching import ROOT
from tests.support.published import eventually

DEADLINE_S = 60
HEAD = f"""
set -euo pipefail
exec </dev/null
nproc() {{ echo 2; }}
source {ROOT}/.ci/stages.sh
patience_s=2
"""


@contextmanager
def started(folder: Path, stages: str) -> "Iterator[subprocess.Popen[str]]":
    """Run the script until the block ends. It reacts to Ctrl-C even if a shell started pytest in the background."""
    (folder / "script").write_text(HEAD + stages + "run_stages\n")
    (folder / "tmp").mkdir()
    script = subprocess.Popen(
        ["env", "--default-signal=INT", "bash", "script"],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield script
    finally:
        script.terminate()
        script.communicate(timeout=DEADLINE_S)


def finish(script: "subprocess.Popen[str]", folder: Path) -> str:
    """Return the script's output. Check that its folder and every process with a PID file are gone."""
    output = script.communicate(timeout=DEADLINE_S)[0]
    assert not list((folder / "tmp").iterdir()), output
    for path in folder.glob("*.pid"):
        eventually(lambda path=path: not runs(int(path.read_text())), DEADLINE_S)
    return output


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_failed_stages_are_named_and_their_dependents_are_skipped(tmp_path):
    stages = r"""
    fails() { echo before; false; echo never; }
    stage "a b" 2 "" "alone a b" sleep 0.2
    stage "fails" 1 "a b" "make fails" fails
    stage "after it" 1 "a b,fails" "x" touch never
    stage "after that" 1 "after it" "x" touch never
    stage "killed" 1 "" "kill it" bash -c 'kill -KILL $$'
    stage "quoted" 1 "a b" "x" printf '%s\n' "it's \$HOME"
    """
    with started(tmp_path, stages) as script:
        output = finish(script, tmp_path)
    assert script.returncode == 1
    assert "Stage fails failed with exit code 1. By itself: make fails\n" in output
    assert "Stage killed failed with exit code 137. By itself: kill it\n" in output
    assert "Stage after it did not run, since fails failed." in output
    assert "Stage after that did not run, since after it failed." in output
    assert "=== fails\nbefore\nStage" in output
    assert "=== quoted\nit's $HOME\n=== quoted: exit code 0" in output
    assert re.search(r"^ +\d+ +\d+  fails  FAILED$", output, re.MULTILINE)
    assert re.search(r"^ +\d+ +\d+  a b$", output, re.MULTILINE)
    assert not (tmp_path / "never").exists()


def test_stages_share_the_slots_and_their_outputs_do_not_mix(tmp_path):
    """Two stages print in turns. A third stage waits: all three would need five places, and there are three."""
    talk = "for i in 1 2 3; do echo {0}$i; touch {0}$i; until [ -e {1}$i ]; do sleep 0.01; done; done"
    stages = f"""
    stage "x" 2 "" "alone" bash -c 'nice; {talk.format("x", "y")}'
    stage "y" 1 "" "alone" bash -c 'nice; {talk.format("y", "x")}'
    stage "large" 2 "" "alone" bash -c 'ls x3 y3'
    """
    with started(tmp_path, stages) as script:
        output = finish(script, tmp_path)
    assert script.returncode == 0
    low = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert f"=== x\n{os.getpriority(os.PRIO_PROCESS, 0)}\nx1\nx2\nx3\n=== x: exit code 0" in output
    assert f"=== y\n{low}\ny1\ny2\ny3\n=== y: exit code 0" in output
    assert output.index("... large begins") > min(output.index("=== x:"), output.index("=== y:"))
    assert "CI passed in" in output


STAYING = """
tidy() {
  echo "tidy speaks"
  exec python3 -c '
import os, time
try:
    open("tidy.pid", "w").write(str(os.getpid()))
    time.sleep(300)
except KeyboardInterrupt:
    print("asked to end", flush=True)
'
}
deaf() {
  setsid bash -c 'echo $$ >gone.pid; exec sleep 300' &
  exec bash -c 'trap "" INT TERM; echo $BASHPID >deaf.pid; while true; do sleep 300; done'
}
stage "tidy" 1 "" "alone" tidy
stage "deaf" 1 "" "alone" deaf
"""


@contextmanager
def staying(folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """Run a stage that ends on a signal, one that ignores signals, and a process that has left its group."""
    pids = [folder / f"{name}.pid" for name in ("tidy", "deaf", "gone")]
    with started(folder, STAYING) as script:
        eventually(lambda: all(path.exists() and path.read_text().strip() for path in pids), DEADLINE_S)
        assert all(runs(int(path.read_text())) for path in pids)
        yield script


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_ci_without_leftover_processes(tmp_path, number):
    with staying(tmp_path) as script:
        os.kill(script.pid, number)
        output = finish(script, tmp_path)
    assert script.returncode == 128 + number
    assert "=== tidy\ntidy speaks\nasked to end\n=== tidy: still running after" in output
    assert f"CI failed with exit code {128 + number} after" in output


def test_a_closed_output_pipe_ends_ci_without_leftover_processes(tmp_path):
    """Like Ctrl-C in `.ci/run | tee log`, which also ends the reader of the output."""
    with staying(tmp_path) as script:
        script.stdout.close()
        script.stdout = None
        os.kill(script.pid, signal.SIGINT)
        finish(script, tmp_path)
    assert script.returncode == 128 + signal.SIGINT


def test_a_file_with_tests_of_a_stage_names_their_marker():
    """A stage of .ci/run passes pytest only the files that contain its marker."""
    tests = ROOT / "tests"
    marked = [path for path in tests.rglob("*.py") if re.search(r"mark\.(slow|vllm|peers)\b", path.read_text())]
    assert {path for path in marked if not path.name.startswith("test_")} == set()
    function = re.search(r"^files_with\(\) .*", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert function is not None
    found = set()
    for marker in ("slow", "vllm", "peers"):
        script = f"{function[0]}\nfiles_with {marker}"
        listed = subprocess.run(["bash", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found.update(ROOT / line for line in listed.stdout.splitlines())
    assert found == set(marked)
