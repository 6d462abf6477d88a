"""A rollout engine that keeps old weights at a weight sync costs one restart and changes no bit of the result."""

import pytest

from rlhf.errors import EXIT_DONE
from tests.support import old_weights
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.launching import small
from tests.support.undisturbed import EXPORT


@pytest.mark.slow
def test_a_run_restarts_by_itself_when_its_engine_keeps_old_weights(tmp_path, undisturbed, sums):
    marker = tmp_path / "kept"
    command = small(tmp_path, "old_weights", sums, EXPORT, "trainer.nproc=1", "trainer.restart_backoff_s=0.01")
    end = train_forked(command, old_weights.environment(marker))
    assert end.code == EXIT_DONE, end.output
    assert marker.exists()
    assert end.output.count("Crash: rank 0: ") == 1
    assert "WeightsMismatch" in end.output
    assert f"(step {old_weights.VERSION})" in end.output
    assert "the engine still has the old values" in end.output
    assert differences(undisturbed.run_dir(1), tmp_path / "rlhf" / "old_weights") == []
