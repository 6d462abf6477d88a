"""Runs with snapshots in memory, killed at every event of a snapshot: the same bits, and no step repeated too often."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from rlhf.ranks.memory_folder import folders_of
from rlhf.storage.layout import RUN_LOG
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.in_memory import memory_base
from tests.support.launching import small
from tests.support.memory_killer import killing, noted

BEFORE = ("memory.snapshot", "memory.before", "commit.file_write", "commit.fsync", "commit.manifest", "commit.rename")
AFTER = ("commit.pointer", "commit.published", "commit.prune", "commit.trash", "memory.after")
"""Events before and after a snapshot is published."""
STEPS = 22
ENDLESS = ("trainer.restart_backoff_s=0", "trainer.max_restarts=100", "trainer.max_failures_per_step=100")


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_kills_at_every_event_of_a_snapshot_repeat_no_more_than_promised(nproc, sums, tmp_path: Path):
    """Promise 21."""
    settings = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=100", f"trainer.nproc={nproc}", *ENDLESS]
    undisturbed = train_forked(small(tmp_path, "undisturbed", sums, *settings))
    assert undisturbed.code == 0, undisturbed.output
    kills = [
        (event, nproc - 1 if event in BEFORE[:4] else 0, "supervisor" if number % 5 == 4 else "rank", number % 2 == 1)
        for number, event in enumerate(BEFORE + AFTER)
    ]
    with memory_base() as base:
        environment, output = killing(tmp_path / "kills", kills), ""
        memory = ["checkpoint.memory.freq=1", f"checkpoint.memory.dir={base}"]
        arguments = small(tmp_path, "killed", sums, *settings, *memory)
        for _ in range(len(kills) + 1):
            end = train_forked(arguments, environment)
            output += end.output
            if end.code != -9:
                break
        assert end.code == 0, output
        assert folders_of(base, tmp_path / "rlhf" / "killed") == []
    assert len(list((tmp_path / "kills").glob("fired_*"))) == len(kills)
    assert differences(tmp_path / "rlhf" / "undisturbed", tmp_path / "rlhf" / "killed") == []
    check_repeats(noted(tmp_path / "kills"), (tmp_path / "rlhf" / "killed" / RUN_LOG).read_text())


def check_repeats(notes: list[str], log: str) -> None:
    """Check that a start resumes at most two steps before the killed step, one if its snapshot was published."""
    # Rank 0 notes each step under its process id. A kill is noted under the id of the killed rank.
    attempts: list[tuple[int, str]] = []
    pid, begun, event = "", 0, ""
    for line in notes:
        who, what, *name = line.split()
        if what == "kill":
            event = name[0]
            continue
        if who != pid and pid:
            attempts.append((begun, event))
            begun = 0
        pid, begun = who, begun + 1
    attempts.append((begun, ""))
    assert len(attempts) == len(BEFORE + AFTER) + 1
    resumed = [int(step) for step in re.findall(r"Resumed step (\d+) from", log)]
    starts = [0] * (len(attempts) - len(resumed)) + resumed  # starts before the first snapshot begin at step 0
    for (start, following), (begun, event) in zip(pairwise(starts), attempts, strict=False):
        under_way = start + begun
        assert under_way - following <= (1 if event in AFTER else 2), (event, start, begun, following)
    assert starts[-1] + attempts[-1][0] == STEPS
