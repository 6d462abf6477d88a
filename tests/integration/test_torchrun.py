"""torchrun as the launcher instead of our supervisor: it trains, restarts after a crash, and hands on a mistake."""

import pytest

from rlhf.errors import EXIT_DONE
from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import small, train
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
    assert differences(expected, tmp_path / "rlhf" / "torchrun") == []


def test_a_misspelt_setting_under_torchrun(tmp_path, sums):
    end = train([*small(tmp_path, "typo", sums), "trainer.save_frq=3"], program=TORCHRUN)
    assert end.code != EXIT_DONE
    assert "there is no setting trainer.save_frq. Did you mean trainer.save_freq?" in end.output
