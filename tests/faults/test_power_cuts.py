"""A few states of the power-cut campaign (`python -m tests.faults.power_cuts`)."""

import random

import pytest

from tests.faults import power_cuts
from tests.support.power_cut_mutations import ROOT, hunt, sync_calls
from tests.support.power_cut_records import records_of
from tests.support.power_cut_replay import replay


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorten the wait before a second look for a file: no folder in these tests shows a file late."""
    monkeypatch.setattr(power_cuts.domains, "LOOK_AGAIN_S", 0.001)


def test_saved_state_is_found_after_a_power_cut(tmp_path):
    for kind in ("linked", "overwrite", "domains"):
        [made] = records_of(kind, tmp_path, seed=1)
        report = replay(made, 40, seed=1)
        assert (report.states, report.failures) == (40, [])


def test_a_missing_sync_makes_a_state_fail(tmp_path):
    [made] = records_of("secret", tmp_path, seed=1)
    in_the_record = {site for op in made.ops for site in op.sites}
    calls = [call for call in sync_calls() if call[0] == "checkpoint/commit/publication.py" and call in in_the_record]
    assert len(calls) == 2
    for call in calls:
        failure, tried = hunt([made], call, "left out", random.Random(1))
        assert failure is not None
        assert tried < 100


def test_each_sync_of_a_start_after_a_kill_has_states(tmp_path):
    """A start syncs the files of a killed process. Under any seed, the kill leaves files to sync."""
    made = records_of("killed_journal", tmp_path, seed=2)
    lines = (ROOT / "experience/journal.py").read_text().splitlines()
    calls = [call for call in sync_calls() if call[0] == "experience/journal.py" and "fsync_" in lines[call[1] - 1]]
    assert len(calls) == 2
    for call in calls:
        assert hunt(made, call, "left out", random.Random(2))[1] > 0


def test_removing_a_sync_call_that_does_not_exist_fails_no_state(tmp_path):
    [made] = records_of("secret", tmp_path, seed=1)
    assert hunt([made], ("nowhere.py", 1, 0), "left out", random.Random(1)) == (None, 0)
