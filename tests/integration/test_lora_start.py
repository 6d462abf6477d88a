"""Starts of runs with adapters: from a peft folder, from the seed, or an error before any weight is read. Also long
runs, which leave the base unchanged."""

import shutil
from dataclasses import asdict

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.backends.base import TrainingBackend
from rlhf.config import LoraConfig
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from rlhf.models.adapter_config import PREFIX, peft_settings
from rlhf.models.adapter_folder import WEIGHTS
from rlhf.models.adapter_layers import target_names, without_adapters
from rlhf.models.adapter_start import fill_from_folder
from rlhf.models.fingerprint import fingerprint
from tests.support.adapted_engines import DORA, LORA, adapted_engine, with_plain_peft
from tests.support.checkpoints import equal_bits, world_of_one
from tests.support.engines import NEEDS_DEEPSPEED, gathered, logits_of, tokens, train
from tests.support.forked_start import train_forked
from tests.support.launching import TINY_POLICY, records
from tests.support.refusals import user_error
from tests.support.rounding import FLOAT32
from tests.support.tiny_updates import tiny_qwen2


@pytest.fixture
def _world(tmp_path):
    with world_of_one(tmp_path):
        yield


def weights_of(backend: TrainingBackend) -> dict[str, Tensor]:
    return gathered(backend.model_shards())


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("lora", [LORA, DORA], ids=["lora", "dora"])
def test_a_folder_of_peft_is_a_start(tmp_path, lora):
    """peft saves the adapters under its own names. The run starts from them bit for bit."""
    trained, other = adapted_engine("fsdp2", lora=lora), adapted_engine("fsdp2", seed=2, lora=lora)
    train(trained, 0, 1)
    with_plain_peft(weights_of(trained), lora).save_pretrained(tmp_path / "adapter")
    assert not equal_bits(weights_of(other), weights_of(trained))
    fill_from_folder(other.model_shards(), tmp_path / "adapter")
    other.after_load()
    assert equal_bits(weights_of(other), weights_of(trained))


@pytest.mark.usefixtures("_world")
def test_a_folder_of_other_layers_or_shapes_is_refused(tmp_path):
    backend = adapted_engine("fsdp2")
    with_plain_peft(weights_of(backend)).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    stored = load_file(file)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"

    save_file(stored | {name: torch.zeros(8, 24)}, file)
    message = user_error(fill_from_folder, backend.model_shards(), tmp_path)
    assert "down_proj.lora_A.weight has shape [8, 24], but the adapter of this model has [4, 24]" in message
    save_file({key: tensor for key, tensor in stored.items() if key != name}, file)
    assert "has no model.layers.0.mlp.down_proj.lora_A.weight." in user_error(
        fill_from_folder, backend.model_shards(), tmp_path
    )
    save_file(stored | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 16)}, file)
    message = user_error(fill_from_folder, backend.model_shards(), tmp_path)
    assert "has an adapter that the settings do not ask for: lm_head.lora_A.weight." in message
    save_file(stored | {name.removeprefix("base_model.model."): torch.ones(4, 32)}, file)
    assert "has adapters twice" in user_error(fill_from_folder, backend.model_shards(), tmp_path)
    save_file(stored | {name: torch.full_like(stored[name], torch.nan)}, file)
    message = user_error(fill_from_folder, backend.model_shards(), tmp_path)
    assert "has values in model.layers.0.mlp.down_proj.lora_A.weight that are not finite" in message
    file.write_bytes(b"torn")
    assert "adapter_model.safetensors can't be read" in user_error(fill_from_folder, backend.model_shards(), tmp_path)


@pytest.mark.usefixtures("_world")
def test_new_adapters_follow_from_the_seed_alone():
    torch.manual_seed(1)
    first = weights_of(adapted_engine("fsdp2", seed=3))
    torch.manual_seed(2)
    assert equal_bits(weights_of(adapted_engine("fsdp2", seed=3)), first)
    assert not equal_bits(weights_of(adapted_engine("fsdp2", seed=4)), first)
    a = [tensor for name, tensor in first.items() if "lora_A" in name]
    bounds = [tensor.shape[1] ** -0.5 for tensor in a]
    assert all(0.8 * bound < tensor.abs().max() <= bound for tensor, bound in zip(a, bounds, strict=True))
    assert len({float(tensor[0, 0]) for tensor in a}) == len(a)
    assert all(not tensor.any() for name, tensor in first.items() if "lora_B" in name)


@NEEDS_DEEPSPEED
@pytest.mark.slow
@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("kind", ["fsdp2", "zero2"])
@torch.no_grad()
def test_base_is_unchanged_after_many_steps_and_weight_syncs(kind, request):
    """In bfloat16, a thousand merges in place and back would change a weight by two thirds of its value. --full-product
    runs a thousand steps."""
    backend = adapted_engine(kind)
    for step in range(1000 if request.config.getoption("full_product") else 50):
        with torch.enable_grad():
            train(backend, step % 7)
        sent = dict(backend.full_tensors(torch.bfloat16))
    base = dict(tiny_qwen2(0).named_parameters())
    assert equal_bits(gathered(backend.base_shards()), base)
    with without_adapters(backend.module):
        assert torch.equal(logits_of(backend, tokens(7)), tiny_qwen2(0)(input_ids=tokens(7)).logits)
    merged = with_plain_peft(weights_of(backend)).merge_and_unload()
    assert equal_bits(sent, {name: weight.bfloat16() for name, weight in merged.named_parameters()})


SMALL = [
    "model.lora.enabled=true",
    "checkpoint.contents=[model,optimizer,extra]",
    "trainer.device=cpu",
    "trainer.threads_per_rank=1",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=1",
    "data.train_batch_size=4",
    "data.reasoning_gym.train_size=8",
    "data.reasoning_gym.val_size=2",
    "actor.ppo_mini_batch_size=4",
]


@pytest.mark.slow
def test_a_run_says_what_it_trains_and_leaves_the_files_alone(tmp_path):
    before = fingerprint(TINY_POLICY)
    ended = train_forked([*SMALL, f"trainer.default_local_dir={tmp_path}", "model.lora.rank=4"])
    assert ended.code == EXIT_DONE, ended.output
    assert "rank 4 on all-linear, base weights frozen" in ended.output
    assert "Policy: llama with 271K parameters, frozen, and 14.6K in adapters on cpu" in ended.output
    assert fingerprint(TINY_POLICY) == before


@pytest.mark.slow
def test_a_resume_does_not_need_the_initial_adapter_folder(tmp_path):
    lora, folder, run_dir = LoraConfig(enabled=True, rank=4, alpha=4.0), tmp_path / "adapter", tmp_path / "rlhf/offline"
    base = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32)
    settings = peft_settings(asdict(lora)) | {"target_modules": target_names(base, lora)}
    get_peft_model(base, PeftConfig(**settings, init_lora_weights=False)).save_pretrained(folder)
    began = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    overrides = [
        *SMALL,
        f"trainer.default_local_dir={tmp_path}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "model.lora.rank=4",
        "model.lora.alpha=4",
        f"model.lora.path={folder}",
    ]

    def end_of_a_run() -> dict[str, bytes]:
        ended = train_forked(overrides)
        assert ended.code == EXIT_DONE, ended.output
        parts = (run_dir / "global_step_2/actor").glob("*/rank_*.safetensors")
        return {str(part.relative_to(run_dir)): part.read_bytes() for part in parts}

    undisturbed = end_of_a_run()
    first = load_file(run_dir / "global_step_1/actor/model/rank_00000.safetensors")
    rate = records(run_dir)[0]["actor/lr"]
    for name, tensor in began.items():
        # AdamW's first step moves a weight by at most the learning rate, and decays it by at most this fraction.
        torch.testing.assert_close(first[name], tensor.flatten(), rtol=rate + FLOAT32, atol=rate)
    assert len(undisturbed) == 2
    shutil.rmtree(run_dir / "global_step_2")
    shutil.rmtree(folder)
    assert end_of_a_run() == undisturbed


@pytest.mark.slow
def test_a_module_that_is_not_there_ends_the_start(tmp_path):
    # A model with its own code is not built before the ranks start.
    wrong = "model.lora.target_modules=[q_proj,downproj] model.trust_remote_code=true"
    ended = train_forked([*SMALL, f"trainer.default_local_dir={tmp_path}", *wrong.split()])
    assert ended.code == EXIT_USER_ERROR, ended.output
    expected = "model.lora.target_modules=['q_proj', 'downproj']: llama has no module called 'downproj'."
    assert f"{expected} Did you mean down_proj? Its linear layers are down_proj, gate_proj," in ended.output
    assert ended.output.count("downproj'.") == 1
