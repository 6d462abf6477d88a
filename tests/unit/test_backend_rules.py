"""Rules for the settings of a backend, before anything is loaded."""

import sys

import pytest
import torch

from rlhf.backends import check_backend
from rlhf.config import BackendConfig, Config
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from tests.support.refusals import facts, says, user_error


def config_of(device: str = "auto", **backend) -> Config:
    config = Config(backend=BackendConfig(**backend))
    config.model.path = "org/name"
    config.data.train_files = "org/name"
    config.trainer.device = device
    return config


def config_error(config: Config) -> str:
    return user_error(validate, config, {})


def test_deepspeed_settings_without_deepspeed():
    says(config_error(config_of(zero_stage=3)), "backend.zero_stage=3", "backend=deepspeed")
    says(config_error(config_of(offload_optimizer=True)), "backend.offload_optimizer=true", "backend=deepspeed")


def test_replicas():
    message = config_error(config_of(name="deepspeed", dp_replicate=2))
    says(message, "backend.dp_replicate=2", "backend=fsdp2", "deepspeed")
    config = config_of(dp_replicate=4)
    config.trainer.nproc = 6
    says(config_error(config), "backend.dp_replicate=4", "trainer.nproc=6", "backend.dp_replicate=2")
    config.trainer.nproc = 8
    validate(config, {}, here=False)


def test_stages():
    assert "backend.zero_stage=4" in config_error(config_of(name="deepspeed", zero_stage=4))
    message = config_error(config_of(name="deepspeed", zero_stage=0, offload_optimizer=True))
    says(message, "backend.offload_optimizer=true", "backend.zero_stage=1, 2 or 3")


def test_offload_without_a_gpu():
    message = config_error(config_of(device="cpu", name="deepspeed", offload_optimizer=True))
    says(message, "trainer.device=cpu", "backend.offload_optimizer=false")
    with pytest.raises(UserError, match=facts("no GPU", "backend.offload_optimizer=false")):
        check_backend(BackendConfig(name="deepspeed", offload_optimizer=True), torch.device("cpu"))


def test_deepspeed_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    message = config_error(config_of(name="deepspeed"))
    says(message, "backend.name=deepspeed", "not installed", "pip install 'rlhf[deepspeed]'")
    with pytest.raises(UserError, match=facts("can't be imported", "pip install 'rlhf[deepspeed]'")):
        check_backend(BackendConfig(name="deepspeed"), torch.device("cpu"))


def test_deepspeed_is_broken(monkeypatch, tmp_path):
    (tmp_path / "deepspeed.py").write_text("raise RuntimeError('CUDA_HOME does not exist')\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=facts("RuntimeError: CUDA_HOME does not exist", "backend=fsdp2")):
        check_backend(BackendConfig(name="deepspeed"), torch.device("cpu"))
    check_backend(BackendConfig(), torch.device("cpu"))


def test_liger_needs_a_gpu_and_no_entropy(monkeypatch):
    message = config_error(config_of(device="cpu", use_liger=True))
    says(message, "backend.use_liger=true", "actor.calculate_entropy=false", "actor.entropy_coeff=0")
    says(message, "backend.use_liger=true", "trainer.device=cpu")
    masked = config_of(use_liger=True)
    masked.rollout.sampling_mask, masked.rollout.top_k = True, 9
    says(config_error(masked), "backend.use_liger=true", "the whole vocabulary", "rollout.sampling_mask=false")
    config = config_of(use_liger=True)
    config.actor.calculate_entropy = False
    for found, problem in (("0.8.4", "liger-kernel 0.8.4 is installed, 0.8.5 is needed"), ("0.9", None)):
        monkeypatch.setattr("rlhf.config.rules.backend_rules.version", lambda _, found=found: found)
        if problem is None:
            validate(config, {})
        else:
            says(config_error(config), problem, "pip install 'rlhf[liger]'")
    with pytest.raises(UserError, match=facts("backend.use_liger=true", "this run has none")):
        check_backend(config.backend, torch.device("cpu"))


def test_two_ways_to_offload_an_optimizer():
    config = config_of(name="deepspeed", offload_optimizer=True)
    config.critic.fsdp_config.optimizer_offload = True
    message = config_error(config)
    says(message, "critic.fsdp_config.optimizer_offload=true", "backend.offload_optimizer=true")
    assert "actor.fsdp_config" not in message
