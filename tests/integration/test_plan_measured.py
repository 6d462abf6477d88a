"""Plan of a run on a CPU against the memory that a real rank takes: 28M parameters, two steps and their saves."""

import sys

import pytest
import torch

from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.planning.check import plan_of
from tests.support.launching import write_sums
from tests.support.measured_memory import measured
from tests.support.tiny_models import causal_lm

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "initializer_range": 0.02,
}
SETTINGS = (
    "recipes=null",
    "trainer.device=cpu",
    "trainer.threads_per_rank=1",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.val_before_train=false",
    "data.train_batch_size=4",
    # The exact length of every prompt and response, so that the plan has the run's micro-batches.
    "data.max_prompt_length=21",
    "data.max_response_length=43",
    "rollout.n=4",
    "rollout.ignore_eos=true",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_max_token_len_per_gpu=512",
    "actor.use_kl_loss=true",
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the highest resident memory from Linux")
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_the_peak_is_planned_within_a_tenth(tmp_path, adapters):
    torch.manual_seed(1)
    causal_lm("llama", tmp_path / "model", **SIZES)
    sums = write_sums(tmp_path / "sums.jsonl")
    overrides = [*SETTINGS, f"model.path={tmp_path / 'model'}", f"data.train_files={sums}"]
    overrides += [f"trainer.default_local_dir={tmp_path}", f"model.lora.enabled={adapters}"]
    found = plan_of(compose_config(overrides, Library.find(None)))
    assert found is not None
    peak = found[1].peak
    assert peak.name == "actor update"
    highest = measured(tmp_path, overrides)
    most = max(highest.values())
    assert highest["update_actor"] == most
    assert abs(peak.total - most) < 0.1 * (most - highest["base"])
