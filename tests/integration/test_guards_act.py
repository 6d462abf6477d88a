"""Guards in real runs: they skip, stop and roll back."""

import pytest
from safetensors.torch import load_file

from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from tests.support.launching import TINY_POLICY, ranks, records, saved_steps, small

# Two optimizer steps per batch. The first is always within `guards.max_kl`, because the policy has not moved yet. The
# second never is.
TIGHT = (
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
    "actor.optim.lr_warmup_steps=0",
    "actor.optim.lr_scheduler_type=constant",
    "actor.optim.lr=1e-3",
    # Far above rounding noise: with a small epsilon, AdamW takes full steps along noise.
    "actor.optim.eps=1e-2",
    "actor.ppo_mini_batch_size=8",
    "actor.ppo_epochs=2",
    "actor.use_kl_loss=false",
    "guards.max_kl=1e-9",
)


def weights(run_dir, step):
    return load_file(run_dir / f"global_step_{step}" / "actor" / "huggingface" / "model.safetensors")


def test_skip_ends_the_update_of_a_batch_and_keeps_the_steps_before(tmp_path, sums):
    hf = "checkpoint.contents=[model,optimizer,extra,hf_model]"
    end = ranks(tmp_path / "log", small(tmp_path, "skip", sums, *TIGHT, hf))
    assert end.code == EXIT_DONE, end.output
    assert "actor kl" in end.output
    run_dir = tmp_path / "rlhf" / "skip"
    assert [(r["guards/refused"], r["guards/skips"]) for r in records(run_dir)[-3:]] == [(1, 1), (1, 2), (1, 3)]
    # The same run with one optimizer step for each batch instead of two.
    end = ranks(tmp_path / "log", small(tmp_path, "one", sums, *TIGHT, hf, "actor.ppo_epochs=1"))
    assert end.code == EXIT_DONE, end.output
    ours, expected = weights(run_dir, 3), weights(tmp_path / "rlhf" / "one", 3)
    # The bits differ, because with one epoch the old log-probs come from the update's own pass, which rounds otherwise.
    # If the second step had been taken, the weights would be apart by about `way`.
    start = load_file(TINY_POLICY / "model.safetensors")
    apart = max(float((ours[name] - expected[name]).abs().max()) for name in expected)
    way = max(float((ours[name] - start[name]).abs().max()) for name in expected)
    assert apart < 1e-2 * way
    assert way > 1e-4


def test_a_refused_reward_leaves_the_weights_alone(tmp_path, sums):
    reward = tmp_path / "falling.py"
    reward.write_text(
        "import itertools\n"
        "calls = itertools.count()\n\n"
        "def falling(data_source, solution_str, ground_truth, extra_info):\n"
        "    # The first step's 32 samples are worth something, all later ones nothing.\n"
        "    number = next(calls)\n"
        "    return float(number % 2) if number < 32 else -5.0\n"
    )
    overrides = (
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.test_freq=0",
        "trainer.val_before_train=false",
        f"reward.functions=[{reward}:falling]",
        "reward.num_workers=1",
        "guards.max_reward_drop=1",
        "checkpoint.contents=[model,optimizer,extra,hf_model]",
    )
    end = ranks(tmp_path / "log", small(tmp_path, "fall", sums, *overrides))
    assert end.code == EXIT_DONE, end.output
    run_dir = tmp_path / "rlhf" / "fall"
    assert [r["guards/refused"] for r in records(run_dir)] == [0, 1]
    first, second = weights(run_dir, 1), weights(run_dir, 2)
    assert all(first[name].equal(second[name]) for name in first)


def test_stop_ends_the_run_with_the_evidence_and_no_restart(tmp_path, sums):
    end = ranks(tmp_path / "log", small(tmp_path, "stop", sums, *TIGHT, "guards.action=stop"))
    assert end.code == EXIT_USER_ERROR
    assert "step 1: actor kl" in end.output
    assert "guards.max_kl" in end.output


def test_a_run_whose_batches_are_all_rejected_ends_with_an_error(tmp_path, sums):
    loss = tmp_path / "nothing.py"
    loss.write_text(
        "from rlhf.algorithms.losses import PolicyLoss\n\n"
        "def nothing(log_probs, old_log_probs, advantages, mask, config):\n"
        "    return PolicyLoss(log_probs * float('nan'), {})\n"
    )
    overrides = (
        f"actor.policy_loss.loss_mode={loss}:nothing",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.test_freq=0",
        "actor.optim.lr_warmup_steps=0",
    )
    end = ranks(tmp_path / "log", small(tmp_path, "nothing", sums, *overrides))
    assert end.code == EXIT_USER_ERROR, end.output
    assert "rejected every batch of the run" in end.output
    assert "step 2: actor loss nan is not finite" in end.output
    assert saved_steps(tmp_path / "rlhf" / "nothing") == [1]


@pytest.mark.parametrize("nproc", [1, 2])
def test_roll_backs_skip_the_batch_and_end_the_run_after_max_events(tmp_path, sums, nproc):
    overrides = (*TIGHT, "guards.action=rollback", "guards.max_events=3", "trainer.save_freq=1")
    end = ranks(tmp_path / "log", small(tmp_path, "back", sums, *overrides), nproc=nproc)
    assert end.code == EXIT_USER_ERROR, end.output
    assert "4 batches in a row, more than guards.max_events=3" in end.output
    assert end.output.count("Resumed step 0 from") == 3
