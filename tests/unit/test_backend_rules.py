"""Rules for the settings of a backend, before anything is loaded."""

import sys

import pytest
import torch

from rlhf.backends import check_backend
from rlhf.config import BackendConfig, Config
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError


def config_of(device: str = "auto", **backend) -> Config:
    config = Config(backend=BackendConfig(**backend))
    config.model.path = "org/name"
    config.data.train_files = "org/name"
    config.trainer.device = device
    return config


def refusal(config: Config) -> str:
    with pytest.raises(UserError) as refused:
        validate(config, {})
    return str(refused.value)


def test_deepspeed_settings_without_deepspeed():
    assert "backend.zero_stage=3: has effect only with backend=deepspeed" in refusal(config_of(zero_stage=3))
    assert "backend.offload_optimizer=True: has effect only" in refusal(config_of(offload_optimizer=True))


def test_replicas():
    message = refusal(config_of(name="deepspeed", dp_replicate=2))
    assert "backend.dp_replicate=2: has effect only with backend=fsdp2 (it is deepspeed)" in message
    config = config_of(dp_replicate=4)
    config.trainer.nproc = 6
    assert "backend.dp_replicate=4 must divide the number of ranks (trainer.nproc=6)" in refusal(config)
    assert "set backend.dp_replicate=2." in refusal(config)
    config.trainer.nproc = 8
    validate(config, {}, here=False)


def test_stages():
    assert "backend.zero_stage=4" in refusal(config_of(name="deepspeed", zero_stage=4))
    message = refusal(config_of(name="deepspeed", zero_stage=0, offload_optimizer=True))
    assert "backend.offload_optimizer=true: needs ZeRO; set backend.zero_stage=1, 2 or 3" in message


def test_offload_without_a_gpu():
    message = refusal(config_of(device="cpu", name="deepspeed", offload_optimizer=True))
    assert "trainer.device=cpu; set backend.offload_optimizer=false" in message
    with pytest.raises(UserError, match=r"has no GPU; set backend\.offload_optimizer=false"):
        check_backend(BackendConfig(name="deepspeed", offload_optimizer=True), torch.device("cpu"))


def test_deepspeed_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    message = refusal(config_of(name="deepspeed"))
    assert "backend.name=deepspeed: DeepSpeed is not installed; run `pip install 'rlhf[deepspeed]'`" in message
    with pytest.raises(UserError, match=r"DeepSpeed can't be imported .*pip install 'rlhf\[deepspeed\]'"):
        check_backend(BackendConfig(name="deepspeed"), torch.device("cpu"))


def test_deepspeed_is_broken(monkeypatch, tmp_path):
    (tmp_path / "deepspeed.py").write_text("raise RuntimeError('CUDA_HOME does not exist')\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"RuntimeError: CUDA_HOME does not exist.* or set backend=fsdp2"):
        check_backend(BackendConfig(name="deepspeed"), torch.device("cpu"))
    check_backend(BackendConfig(), torch.device("cpu"))


def test_liger_needs_a_gpu_and_no_entropy(monkeypatch):
    message = refusal(config_of(device="cpu", use_liger=True))
    assert "set actor.calculate_entropy=false, actor.entropy_coeff=0 and" in message
    assert "but trainer.device=cpu; set it to false" in message
    config = config_of(use_liger=True)
    config.actor.calculate_entropy = False
    for found, problem in (("0.8.4", "liger-kernel 0.8.4 is installed, 0.8.5 is needed"), ("0.9", None)):
        monkeypatch.setattr("rlhf.config.rules.backend_rules.version", lambda _, found=found: found)
        if problem is None:
            validate(config, {})
        else:
            assert f"{problem}; run `pip install 'rlhf[liger]'`" in refusal(config)
    with pytest.raises(UserError, match=r"backend\.use_liger=true: .* this run has none"):
        check_backend(config.backend, torch.device("cpu"))


def test_two_ways_to_offload_an_optimizer():
    config = config_of(name="deepspeed", offload_optimizer=True)
    config.critic.fsdp_config.optimizer_offload = True
    message = refusal(config)
    assert "critic.fsdp_config.optimizer_offload=true: backend.offload_optimizer=true has the optimizer in" in message
    assert "actor.fsdp_config" not in message
