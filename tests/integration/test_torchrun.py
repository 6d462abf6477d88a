"""torchrun as the launcher instead of our supervisor: it trains, restarts after a crash, and reports user errors."""

import subprocess
import sys

import pytest

from rlhf.errors import EXIT_DONE
from rlhf.storage.layout import RUN_LOG
from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import DEADLINE_S, small, train
from tests.support.undisturbed import EXPORT

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.slow
def test_a_crash_under_torchrun_is_restarted_and_changes_nothing(tmp_path, sums, undisturbed):
    expected = undisturbed.run_dir(2)
    marker = tmp_path / "crashed"
    command = [*small(tmp_path, "torchrun", sums), EXPORT]
    crash = at("update.before", 5, "raise", rank=1, once=marker)
    end = train(command, crash, (*TORCHRUN, "--max-restarts", "1"))
    assert end.code == EXIT_DONE, end.output
    assert marker.exists()
    assert "asked for at update.before number 5" in end.output
    run_dir = tmp_path / "rlhf" / "torchrun"
    assert differences(expected, run_dir) == []
    log = (run_dir / RUN_LOG).read_text()
    assert log.count("\n  run      ") == 2, "the banner of each attempt"
    for text in (
        "(resumed at step 3)",
        "loading the weights",
        "step 7/7",
        "asked for at update.before number 5",
        "Done.",
    ):
        assert text in log
    assert "generating" not in log.split("step 7/7")[1]


AGENT = """
import os, sys, time
from pathlib import Path
from rlhf.ranks.parent import torchrun_agent
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
with Path(sys.argv[1]).open("a") as file:
    file.write(f"{os.environ['RANK']} {restart} {torchrun_agent()}\\n")
deadline = time.monotonic() + 60
# The end of one rank also ends the other, which must write first.
while Path(sys.argv[1]).read_text().count(f" {restart} ") < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
sys.exit(restart == "0")
"""


@pytest.mark.slow
def test_a_rank_identifies_its_torchrun_launch_in_every_attempt(tmp_path, launches):
    """Two launches with the run id "none", which every launch without an elastic rendezvous has."""
    (tmp_path / "agent.py").write_text(AGENT)
    script = tmp_path / "rank.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} {tmp_path}/agent.py $1\nexit $?\n")
    script.chmod(0o755)

    def launch(name: str, command: list[str]) -> list[list[str]]:
        torchrun = [sys.executable, *TORCHRUN, "--max-restarts", "1", "--master-port", "0"]
        subprocess.run([*torchrun, *command, str(tmp_path / name)], check=True, timeout=DEADLINE_S)
        return sorted(line.split() for line in (tmp_path / name).read_text().splitlines())

    commands = {"plain": [str(tmp_path / "agent.py")], "script": ["--no-python", str(script)]}
    found = [launches.submit(launch, *item).result() for item in commands.items()]
    for lines in found:
        assert [line[:2] for line in lines] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
        assert len({agent for _, _, agent in lines}) == 1
    assert found[0][0][2] != found[1][0][2]


def test_a_misspelt_setting_under_torchrun(tmp_path, sums):
    end = train([*small(tmp_path, "typo", sums), "trainer.save_frq=3"], program=TORCHRUN)
    assert end.code != EXIT_DONE
    assert "there is no setting trainer.save_frq. Did you mean trainer.save_freq?" in end.output
