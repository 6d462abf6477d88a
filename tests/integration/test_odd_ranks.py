"""Runs on numbers of ranks that divide no batch: the same metrics as on one rank, and after kills the same bits."""

from pathlib import Path

import pytest

from tests.support.compare_runs import differences, history
from tests.support.interrupter import at
from tests.support.launching import Ended, ranks, small
from tests.support.rounding import sum_bound

pytestmark = pytest.mark.slow
NPROC, STEPS = 3, 2
# A step then sends values and the log-probs of actor and reference to the rollout batch, and advantages and returns to
# the training batch. Groups are dropped, and carried over.
SETTINGS = (
    "algorithm=ppo",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "algorithm.filter_groups.enable=true",
    "data.gen_batch_size=7",
    "trainer.critic_warmup=0",
    "actor.ppo_max_token_len_per_gpu=200",
    "checkpoint.journal=true",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "actor.optim.lr_warmup_steps=1",
    # Far above rounding noise: with a small epsilon, AdamW takes full steps along noise.
    "actor.optim.eps=1e-2",
    "critic.optim.eps=1e-2",
)


def start(folder: Path, name: str, sums: Path, nproc: int, environment: dict[str, str] | None = None) -> Ended:
    return ranks(folder / "log", small(folder, name, sums, *SETTINGS), environment, nproc)


@pytest.fixture(scope="module")
def three(sums: Path, tmp_path_factory) -> Path:
    """The directory of an undisturbed run on three ranks."""
    folder = tmp_path_factory.mktemp("three")
    end = start(folder, "three", sums, NPROC)
    assert end.code == 0, end.output
    return folder / "rlhf" / "three"


def test_three_ranks_have_the_metrics_of_one_rank(three, sums, tmp_path: Path):
    end = start(tmp_path, "one", sums, 1)
    assert end.code == 0, end.output
    single, several = history(tmp_path / "rlhf" / "one"), history(three)
    assert [record["step"] for record in single] == [record["step"] for record in several]
    for one, other in zip(single, several, strict=True):
        for record in (one, other):
            record.pop("reward/timeouts", None)
        assert one.keys() == other.keys()
        bound = sum_bound(one["tokens/total"])  # metrics sum terms of about 1 over a step's tokens
        assert other == pytest.approx(one, rel=bound, abs=bound)
    assert single[-1]["sampling/groups_dropped"] > 0


def test_a_killed_run_on_three_ranks_ends_with_the_same_bits(three, sums, tmp_path: Path):
    # The kill is in the first step, so the next start takes the step's samples from the journal.
    kill = at("update.mid", 3, "SIGKILL", rank=1, once=tmp_path / "hit")
    assert start(tmp_path, "killed", sums, NPROC, kill).code != 0
    assert (tmp_path / "hit").exists()
    end = start(tmp_path, "killed", sums, NPROC)
    assert end.code == 0, end.output
    assert differences(three, tmp_path / "rlhf" / "killed") == []
