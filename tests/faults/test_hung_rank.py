"""Hung ranks: each is found, named with its stacks and restarted, and the run ends with the undisturbed bits."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.errors import EXIT_DONE
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.hanger import hangs
from tests.support.launching import Ended, saved_steps, small
from tests.support.rank_scripts import supervised
from tests.support.undisturbed import EXPORT, Undisturbed

# Longer than any phase on a busy machine, shorter than two pauses.
DEADLINE_S = 15
SETTINGS = ("trainer.nproc=2", f"trainer.watchdog_timeout_s={DEADLINE_S}", "trainer.restart_backoff_s=0.1")
# `hanger` hangs before the event is written.
PLAN = (("rollout.after", 2, 1, "sleep_forever"), ("update.mid", 9, 0, "stop_forever"))
PHASES = ("rollout.before", "update.before")


@dataclass(frozen=True)
class Story:
    """A run of several attempts. Its log is split into one text for each hang."""

    run_dir: Path
    end: Ended
    crashes: list[str]


@pytest.fixture(scope="module")
def story(tmp_path_factory, launches: ThreadPoolExecutor, undisturbed: Undisturbed, sums: Path) -> Story:
    folder = tmp_path_factory.mktemp("hung")
    command = [*small(folder, "hung", sums), *SETTINGS, EXPORT]
    end = launches.submit(train_forked, command, hangs(folder, *PLAN)).result()
    assert sorted(path.name for path in folder.glob("hung_*")) == [f"hung_{i}" for i in range(len(PLAN))], end.output
    return Story(folder / "rlhf" / "hung", end, end.output.split("Crash: ")[1:])


@pytest.mark.slow
def test_each_hang_is_found_within_its_deadline_and_its_rank_is_named(story):
    assert story.end.code == EXIT_DONE, story.end.output
    assert len(story.crashes) == len(PLAN), story.end.output
    for (_, _, rank, way), phase, text in zip(PLAN, PHASES, story.crashes, strict=True):
        found = text.splitlines()[0]
        assert found.startswith(f"rank {rank}: hung, no progress for "), (way, text)
        assert f" s after {phase} (deadline {DEADLINE_S} s, trainer.watchdog_timeout_s), and was killed" in found, way
        seconds = int(found.split("no progress for ")[1].split(" s ")[0])
        assert DEADLINE_S <= seconds <= DEADLINE_S + 6, way
        assert f"rank {1 - rank} is here:" in text, way


@pytest.mark.slow
def test_the_stacks_say_where_it_hangs_and_who_waits(story):
    shown = story.crashes[0].split("rank 1 hangs here:\n")[1]
    assert " in sleep_forever" in shown.splitlines()[0]
    assert " in groups" in shown
    # The files stay. The other rank's stack shows which rank it waits for.
    hung, waiting = (story.run_dir / f"status/hang_1_rank_{rank}.txt" for rank in (1, 0))
    assert " in sleep_forever" in hung.read_text()
    assert "/torch/distributed/" in waiting.read_text()
    assert f"The stacks of all threads: {waiting}, {hung}" in story.crashes[0]


@pytest.mark.slow
def test_a_stopped_process_is_recognised(story):
    assert "rank 0 hangs here:\n    stopped, as by SIGSTOP or a debugger" in story.crashes[1]
    assert [path.name for path in (story.run_dir / "status").glob("hang_2_*")] == ["hang_2_rank_1.txt"]


@pytest.mark.slow
def test_the_finished_run_is_the_undisturbed_one(story, undisturbed):
    assert saved_steps(story.run_dir)[0] == 7
    assert differences(undisturbed.run_dir(2), story.run_dir) == []


@pytest.mark.slow
def test_slow_phases_within_the_deadline_raise_no_alarm(tmp_path, sums):
    """Two slow phases are together longer than the deadline, one of them in an evaluation. The other rank waits."""
    slow = hangs(tmp_path, ("evaluation.after", 1, 1, "pause"), ("rollout.after", 1, 0, "pause"))
    problems = ("reward=reasoning_gym", "data.train_files=null", "data.reasoning_gym.val_size=8")
    command = [*small(tmp_path, "slow", sums), *SETTINGS, *problems, "data.reasoning_gym.train_size=30"]
    end = train_forked([*command, "trainer.total_training_steps=1", "actor.optim.lr_warmup_steps=0"], slow)
    assert end.code == EXIT_DONE, end.output
    assert len(list(tmp_path.glob("hung_*"))) == 2, end.output
    assert "Crash" not in end.output


RANK = """
import os, sys
from pathlib import Path
from rlhf.ranks.parent import die_with_parent
die_with_parent()
from rlhf.ranks.status import StatusWriter
from tests.support import hanger
rank, run_dir = int(os.environ["RANK"]), Path(sys.argv[1])
status = StatusWriter(run_dir, rank)
if (run_dir / "hung").exists():
    sys.exit(0)
"""
TURNS = """
if rank == 0:
    sys.exit(0)  # no other rank waits for rank 1
status.event(5, "update.before")
(run_dir / "hung").touch()
hanger.busy_loop_forever()
"""
DEADLOCK = """
import torch, torch.distributed as dist
from rlhf.config import TrainerConfig
from rlhf.ranks import collectives
collectives.start(TrainerConfig(device="cpu"))
dist.barrier()
(run_dir / "hung").touch()
status.event(5, "step.begin")
if rank == 1:
    (run_dir / "begun").touch()
    hanger.block_in_collective()
hanger.wait_for(run_dir / "begun")  # so that the rank that causes the hang is overdue first
status.event(5, "rollout.before")
dist.all_reduce(torch.zeros(1))
"""
LATECOMER = """
import torch, torch.distributed as dist
from rlhf.config import TrainerConfig
from rlhf.ranks import collectives
collectives.start(TrainerConfig(device="cpu"))
dist.barrier()
(run_dir / "hung").touch()
if rank == 1:
    hanger.rest()  # so that rank 0, which waits for rank 1, is overdue first
status.event(5, "update.before")
if rank == 1:
    hanger.sleep_forever()
dist.all_reduce(torch.zeros(1))
"""
SAVE = """
import threading
status.event(5, "step.begin")
def save():
    status.event(5, "commit.before")
    status.event(5, "commit.fsync")
    hanger.sleep_forever()
if rank == 1:
    (run_dir / "hung").touch()
    threading.Thread(target=save, daemon=True).start()
while True:
    hanger.rest()
    status.event(6, "update.mid")
"""
IMPORTS = """
if rank == 0:
    sys.exit(0)
(run_dir / "hung").touch()
hanger.sleep_forever()
"""


@pytest.mark.parametrize(
    ("script", "phase", "frame"),
    [
        (TURNS, "update.before", "in busy_loop_forever"),
        (DEADLOCK, "step.begin", "in recv"),
        (LATECOMER, "update.before", "in sleep_forever"),
        (SAVE, "commit.fsync", "in sleep_forever"),
        (IMPORTS, "start", "in sleep_forever"),
    ],
    ids=["an endless loop", "a deadlocked collective", "the later one of two", "a save behind the loop", "a start"],
)
def test_hung_scripts_are_found_with_phase_and_stack(tmp_path, monkeypatch, caplog, script, phase, frame):
    """Ranks without a model, for hangs that need no training."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    config = Config()
    t = config.trainer
    t.default_local_dir, t.nproc, t.restart_backoff_s = str(tmp_path), 2, 0.01
    t.watchdog_timeout_s = config.checkpoint.timeout_s = 4.0
    t.watchdog_first_timeout_s = 10.0 if script is IMPORTS else 120.0
    config.run_dir.mkdir(parents=True)
    code = supervised(config, tmp_path / "rank.py", RANK + script)
    assert code == EXIT_DONE, caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.name == "rlhf.launch.supervisor"]
    assert len(warnings) == 2
    assert re.match(rf"Crash: rank 1: hung, no progress for \d+ s after {phase} ", warnings[0]), warnings[0]
    assert "hangs here:\n    File" in warnings[1]
    assert frame in warnings[1].split("hangs here:\n")[1].splitlines()[0]
