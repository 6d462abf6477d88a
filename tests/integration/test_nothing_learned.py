"""A reward that fails on every sample ends the run; a run that goes on says at its end that it learned nothing."""

import json
from pathlib import Path

import pytest

from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from tests.support.forked_start import train_forked
from tests.support.interrupter import at
from tests.support.launching import TINY_POLICY, records, small
from tests.support.refusals import says

LITTLE = (
    "data.train_batch_size=2",
    "rollout.n=2",
    "actor.ppo_mini_batch_size=2",
    "actor.use_kl_loss=false",
    "actor.optim.lr_warmup_steps=0",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "trainer.restart_backoff_s=0",
    "reward.timeout_s=1",
)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A reward that takes too long on every sample, unless the file `fast` is there."""
    path, fast = tmp_path / "slow.py", tmp_path / "fast"
    path.write_text(
        "import os, time\ndef score(solution_str):\n"
        f"    time.sleep(0 if os.path.exists({str(fast)!r}) else 60)\n    return float(len(solution_str))\n"
    )
    return path


def test_a_step_without_a_score_ends_the_run_until_the_function_is_corrected(slow, sums, tmp_path):
    """On two ranks with the journal. After the correction, the samples of the journal are scored again."""
    command = small(tmp_path, "stops", sums, *LITTLE, f"reward.functions=[{slow}:score]", "trainer.nproc=2")
    for _ in range(2):
        end = train_forked([*command, "checkpoint.journal=true"])
        assert end.code == EXIT_USER_ERROR, end.output
        says(end.output, "all 4 samples", "reward.on_error", "slow.py:score", "reward.timeout_s=1", "reward.on_error")
        assert end.output.count("The last failure") == 1
        assert "Restart" not in end.output
        assert not (tmp_path / "rlhf" / "stops" / "report").exists()
    (tmp_path / "fast").touch()
    end = train_forked([*command, "checkpoint.journal=true"])
    assert end.code == EXIT_DONE, end.output
    history = records(tmp_path / "rlhf" / "stops")
    assert history[0]["perf/journal_samples"] == 1
    assert history[0]["reward/timeouts"] < 4


def test_failures_that_ended_the_run_are_not_repeated_from_the_journal(tmp_path):
    """On two ranks. The environment's service is down, and the same command works once it is up."""
    up, file = tmp_path / "up", tmp_path / "down.py"
    file.write_text(
        "import os\nfrom rlhf.environments import free_text\n\n\nclass Down:\n    def reset(self, **row):\n"
        "        return None\n\n    @free_text\n    def step(self, text):\n"
        f"        if not os.path.exists({str(up)!r}):\n"
        "            raise ConnectionError('no service')\n        return None, float(len(text))\n"
    )
    settings = [
        "recipes=env_guess",
        f"env.classes=[{file}:Down]",
        "checkpoint.journal=true",
        "data.val_files=null",
        f"env.writable=[{tmp_path}]",
    ]
    tmp_path.chmod(0o777)
    settings += [f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=down", "trainer.nproc=2"]
    command = [*settings, "trainer.device=cpu", "trainer.threads_per_rank=1", "trainer.test_freq=0", *LITTLE]
    for _ in range(2):
        end = train_forked(command)
        assert end.code == EXIT_USER_ERROR, end.output
        says(end.output, "4 of 4 samples failed", "env.max_failed", "no service")
    up.touch()
    end = train_forked(command)
    assert end.code == EXIT_DONE, end.output
    assert records(tmp_path / "rlhf" / "down")[0]["perf/env_failures"] == 0


def test_an_evaluation_without_a_score_has_no_result(slow, sums, tmp_path):
    command = [str(TINY_POLICY), f"data.val_files={sums}", "data.val_max_samples=3", "reward.timeout_s=1"]
    command += [f"reward.functions=[{slow}:score]", f"trainer.default_local_dir={tmp_path}"]
    end = train_forked(command, module="rlhf.evaluate.__main__")
    assert end.code == EXIT_USER_ERROR, end.output
    says(end.output, "all 3 samples", "slow.py:score")
    assert not list(tmp_path.rglob("evaluation.json"))


def test_a_killed_run_reports_the_findings_of_an_undisturbed_run(slow, sums, tmp_path):
    found = []
    for name, kill in (("whole", {}), ("killed", at("update.after", 2, "SIGKILL", once=tmp_path / "hit"))):
        command = small(tmp_path, name, sums, *LITTLE, f"reward.functions=[{slow}:score]", "reward.on_error=score")
        end = train_forked(command, kill)
        assert end.code == EXIT_DONE, end.output
        report = json.loads((tmp_path / "rlhf" / name / "report" / "report.json").read_text())
        for finding in report["findings"]:
            assert finding in " ".join(end.output.replace("warning ", "").split())
        found.append(report["findings"])
    assert (tmp_path / "hit").exists()
    assert found[0] == found[1]
    says(
        found[0], "reward never changed", "3 of 3 steps", "rlhf.samples RUN_DIR", "gradient was 0", "timed out 12 times"
    )
