"""A few states of the power-cut campaign, whose command has many more: python -m tests.faults.power_cuts."""

import pytest

from tests.faults import power_cuts
from tests.faults.power_cuts import records_of, replay


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No folder here shows a file late."""
    monkeypatch.setattr(power_cuts.domains, "LOOK_AGAIN_S", 0.001)


def test_what_was_saved_is_found(tmp_path):
    for kind in ("linked", "overwrite", "domains"):
        [made] = records_of(kind, tmp_path, seed=1)
        report = replay(made, 40, seed=1)
        assert (report.states, report.failures) == (40, [])
