"""Runs with the rollout journal, killed after generation: no sample is generated twice, and the bits equal an
undisturbed run without journal."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.experience.journal import FOLDER
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.interrupter import at
from tests.support.launching import STEPS, ranks, records, small
from tests.support.undisturbed import EXPORT

JOURNAL = "checkpoint.journal=true"
# A step has two mini-batches and two journal writes, and every third step is saved. Each case has the event of the kill
# and the steps whose samples the restart reads from the journal.
KILLS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "update": ({"event": "update.mid", "number": 11}, {4, 5, 6}),
    "samples without rewards": ({"event": "rollout.after", "number": 5}, {4, 5}),
    "a record not yet durable": ({"event": "journal.fsync", "number": 10}, {4, 5}),
    "a record not yet written": ({"event": "journal.append", "number": 9}, {4}),
}


def assert_nothing_was_lost(run_dir: Path, undisturbed: Path, journaled: set[int]) -> None:
    assert differences(undisturbed, run_dir) == []
    shares = {record["step"]: record["perf/journal_samples"] for record in records(run_dir)}
    assert shares == {step: float(step in journaled) for step in range(1, STEPS + 1)}
    assert list((run_dir / FOLDER).iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_a_kill_costs_no_samples_and_no_bit(name, undisturbed, sums, tmp_path: Path):
    kill, journaled = KILLS[name]
    # Synchronous saves, so that the killed run's checkpoints are known.
    waits = "checkpoint.async_save=false"
    arguments, log = small(tmp_path, "killed", sums, JOURNAL, EXPORT, waits), tmp_path / "log"
    environment = at(**kill, what="SIGKILL", once=tmp_path / "hit")
    assert ranks(log, arguments, environment).code == -9
    end = ranks(log, arguments, environment)
    assert end.code == 0, end.output
    assert_nothing_was_lost(tmp_path / "rlhf" / "killed", undisturbed.run_dir(1), journaled)


@pytest.mark.slow
def test_two_ranks_that_are_killed_before_their_first_checkpoint_repeat_no_rollout(undisturbed, sums, tmp_path: Path):
    arguments = small(tmp_path, "killed", sums, JOURNAL, EXPORT, "trainer.nproc=2", "trainer.restart_backoff_s=0")
    environment = at("update.mid", 4, "SIGKILL", rank=1, once=tmp_path / "hit")
    end = train_forked(arguments, environment)
    assert end.code == 0, end.output
    assert (tmp_path / "hit").exists()
    assert_nothing_was_lost(tmp_path / "rlhf" / "killed", undisturbed.run_dir(2), {1, 2})


@pytest.mark.slow
def test_a_rollback_repeats_its_steps_from_the_journal(sums, tmp_path: Path):
    def run(name: str, *more: str) -> Path:
        guards = ["guards.action=rollback", "guards.max_reward_drop=0.15", "guards.max_events=100"]
        end = ranks(tmp_path / "log", small(tmp_path, name, sums, *guards, *more))
        assert end.code == 0, end.output
        return tmp_path / "rlhf" / name

    without, with_journal = run("without"), run("with", JOURNAL)
    assert differences(without, with_journal) == []
    assert records(without)[-1]["guards/rollbacks"] > 0
    shares = [record["perf/journal_samples"] for record in records(with_journal)]
    assert 1.0 in shares
    assert 0.0 in shares
