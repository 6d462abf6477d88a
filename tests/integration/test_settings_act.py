"""Settings of the rollout, the loss and the engine change the numbers of a run. Each run here has at most two
steps."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from tests.support.launching import TINY_POLICY, ranks, records, saved_steps, small
from tests.support.rounding import independent_bound

# No warm-up, so that the first step moves the weights and the second step shows the effect.
TWO_STEPS = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=0",
    "actor.optim.lr_warmup_steps=0",
    "actor.optim.lr=1e-3",
    "actor.kl_loss_coef=0.1",
)


class Runs:
    """Runs of two steps, one for each set of overrides. A call returns the run's metric records."""

    def __init__(self, folder: Path, sums: Path):
        self.folder, self.sums, self.known = folder, sums, {}

    def __call__(self, *overrides: str) -> list[dict]:
        if overrides not in self.known:
            name = f"run_{len(self.known)}"
            end = ranks(self.folder / "log", small(self.folder, name, self.sums, *TWO_STEPS, *overrides))
            assert end.code == EXIT_DONE, end.output
            self.known[overrides] = records(self.folder / "rlhf" / name)
        return self.known[overrides]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sums) -> Runs:
    return Runs(tmp_path_factory.mktemp("settings"), sums)


def test_kinds_of_kl_agree_at_the_start_and_differ_after_a_step(runs):
    k1, k2, k3 = (runs(f"actor.kl_loss_type={kind}") for kind in ("k1", "k2", "k3"))
    # The weights have moved away from the reference by the second step.
    assert k1[0]["reward/mean"] == k2[0]["reward/mean"] == k3[0]["reward/mean"]
    second = [run[1]["actor/kl_loss"] for run in (k1, k2, k3)]
    assert len(set(second)) == 3
    assert second[1] > 0
    assert second[2] > 0


def test_modes_of_aggregation_give_other_losses_for_the_same_samples(runs):
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    first = [runs(f"actor.loss_agg_mode={mode}")[0] for mode in modes]
    assert len({record["tokens/total"] for record in first}) == 1
    assert len({record["actor/grad_norm"] for record in first}) == 3


def test_several_epochs_over_mini_batches_raise_the_clip_fraction(runs):
    once, twice = runs(), runs("actor.ppo_epochs=3", "actor.clip_ratio_low=0.01", "actor.clip_ratio_high=0.01")
    assert once[0]["reward/mean"] == twice[0]["reward/mean"]
    assert once[0]["actor/pg_clipfrac"] < twice[0]["actor/pg_clipfrac"]


def test_recomputed_activations_change_nothing(runs):
    plain, recomputed = runs()[0], runs("model.enable_gradient_checkpointing=true")[0]
    for name in ("actor/loss", "actor/grad_norm", "actor/kl_loss", "reward/mean"):
        assert recomputed[name] == plain[name], name


def test_autocast_shows_as_rounding(runs):
    plain, autocast = runs()[0], runs("backend.autocast=bfloat16")[0]
    # A unit in the last place is 2^16 times larger in bfloat16. On a log scale, 2^8 is half of this.
    assert 2**8 * plain["rollout/logprob_diff_max"] < autocast["rollout/logprob_diff_max"] < 0.5
    # Each of two layers has 14 roundings one after another. Four products (attention's input and output, the gates and
    # the last one) have three each: input, weight and output. Two of these inputs are already rounded. The
    # attention and the activation have two roundings each. The head has three.
    forward = 2 * 14 + 3
    assert autocast["reward/mean"] == plain["reward/mean"]
    # The backward pass has two products for each product of the forward pass.
    apart = independent_bound(3 * forward, torch.bfloat16)
    assert autocast["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=apart)


def test_stop_strings_end_samples_early(runs):
    plain, stopped = runs()[0], runs("rollout.stop=['1','2','3']")[0]
    assert stopped["response_length/mean"] < plain["response_length/mean"]


def test_a_tiny_top_p_is_greedy_and_gives_no_gradient(runs):
    # The KL to the reference is off: its gradient is 0 only up to the rounding of log-probs.
    alone = "actor.use_kl_loss=false"
    plain, greedy = runs(alone)[0], runs(alone, "rollout.top_p=1e-6")[0]
    assert greedy["actor/pg_loss"] == 0
    assert greedy["actor/grad_norm"] == 0 < plain["actor/grad_norm"]


def test_top_k_keeps_a_hot_policy_among_its_likeliest_tokens(runs):
    wild, kept = runs("rollout.temperature=100")[0], runs("rollout.temperature=100", "rollout.top_k=2")[0]
    assert wild["reward/mean"] == 0 < kept["reward/mean"]


def test_with_sampling_masks_the_update_has_the_log_probs_of_the_rollout(runs):
    hot = ("rollout.temperature=3", "rollout.top_k=4", "rollout.top_p=0.9")
    plain, masked = runs(*hot), runs(*hot, "rollout.sampling_mask=true")
    assert plain[0]["reward/mean"] == masked[0]["reward/mean"]
    for step in (0, 1):
        assert plain[step]["rollout/logprob_diff_max"] > 0.1
        assert masked[step]["rollout/logprob_diff_max"] < 1e-5
        assert masked[step]["actor/entropy"] < plain[step]["actor/entropy"]
    assert masked[1]["actor/grad_norm"] != plain[1]["actor/grad_norm"]


def test_math_verify_is_a_reward(runs):
    exact, verified = runs()[0], runs("reward=math_verify")[0]
    assert verified["reward/timeouts"] == 0
    assert verified["reward/mean"] == exact["reward/mean"]


@pytest.mark.parametrize("contents", ["hf_model", "model", "model,extra", "optimizer,hf_model"])
def test_checkpoints_have_exactly_contents_and_a_run_resumes_from_them(tmp_path, sums, contents):
    command = [
        f"checkpoint.contents=[{contents}]",
        "trainer.save_freq=1",
        "actor.optim.lr_scheduler_type=constant",
        "actor.optim.lr_warmup_steps=0",
    ]
    run_dir = tmp_path / "rlhf" / "run"
    one = ranks(tmp_path / "log", [*small(tmp_path, "run", sums, *command), "trainer.total_training_steps=1"])
    assert one.code == EXIT_DONE, one.output
    names = set(contents.split(","))
    assert set(read_manifest(run_dir / "global_step_1").contents) == names
    folders = {path.name for path in (run_dir / "global_step_1" / "actor").iterdir()}
    assert folders == {"huggingface" if name == "hf_model" else name for name in names}
    two = ranks(tmp_path / "log", [*small(tmp_path, "run", sums, *command), "trainer.total_training_steps=2"])
    assert two.code == EXIT_DONE, two.output
    assert "Resumed step 1" in two.output
    assert saved_steps(run_dir) == [2, 1]


def test_a_model_without_chat_template_is_one_message(tmp_path, sums):
    folder = tmp_path / "model"
    shutil.copytree(TINY_POLICY, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    end = ranks(tmp_path / "log", small(tmp_path, "run", sums, f"model.path={folder}"))
    assert end.code == EXIT_USER_ERROR
    assert "chat template" in end.output
    assert "model.chat_template" in end.output
    assert "Traceback" not in end.output


@pytest.mark.parametrize("damage", ["cut", "other layers"])
def test_weights_that_do_not_fit_their_config_are_one_message(tmp_path, sums, damage):
    folder = tmp_path / "model"
    shutil.copytree(TINY_POLICY, folder)
    if damage == "cut":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
    else:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 9}))
    end = ranks(tmp_path / "log", small(tmp_path, "run", sums, f"model.path={folder}"))
    assert end.code == EXIT_USER_ERROR
    assert f"model.path={folder}" in end.output
    assert "Traceback" not in end.output


def test_a_function_may_not_replace_a_metric(tmp_path, sums):
    (tmp_path / "r.py").write_text("def f(**kwargs):\n    return {'score': 1, 'mean': 2}\n")
    end = ranks(tmp_path / "log", small(tmp_path, "run", sums, f"reward.functions=[{tmp_path}/r.py:f]"))
    assert end.code == EXIT_USER_ERROR
    assert "returned 'mean', but the metric reward/mean is already" in end.output
