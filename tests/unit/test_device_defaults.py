"""Device defaults: values on GPUs and on a CPU, what overrides them, and a resume on another device."""

import pytest

from rlhf.compose import composition
from rlhf.config import Config
from rlhf.config.compare import compare, reject_changes
from rlhf.config.known_settings import SETTINGS
from rlhf.config.library import Library
from rlhf.config.resolved import from_yaml, to_yaml
from rlhf.errors import UserError
from rlhf.launch.banner import banner
from rlhf.planning import devices
from rlhf.planning.device_defaults import Machine, device_defaults
from rlhf.planning.devices import count_gpus

GPUS = Machine(4, None)
NO_GPU = Machine(0, None)
BASE = ["model.path=org/name", "data.train_files=x.jsonl"]
KEYS = ("trainer.nproc", "trainer.tf32", "rollout.name", "rollout.dtype", "backend.autocast")
ON_GPUS = (4, True, "vllm", "bfloat16", "bfloat16")


def composed(machine: Machine, *overrides: str) -> Config:
    recipe = [] if any(text.startswith("recipes=") for text in overrides) else ["recipes=null"]
    return composition([*BASE, *recipe, *overrides], Library.find(None), machine).resolved()


def chosen(config: Config) -> tuple[object, ...]:
    return tuple(SETTINGS[key].value(config) for key in KEYS)


def test_settings_with_device_defaults():
    assert {key for key, setting in SETTINGS.items() if setting.metadata["by_device"]} == set(KEYS)


def test_on_a_cpu_the_defaults_are_those_of_the_schema():
    assert chosen(composed(NO_GPU)) == chosen(Config()) == (1, False, "embedded", "float32", "none")
    assert chosen(composed(GPUS, "trainer.device=cpu")) == chosen(Config())


@pytest.mark.parametrize(
    ("machine", "overrides", "expected"),
    [
        (GPUS, [], ON_GPUS),
        (GPUS, ["trainer.device=cuda"], ON_GPUS),
        (GPUS, ["recipes=dapo_math"], ON_GPUS),
        (Machine(2, "vLLM is not installed."), [], (2, True, "embedded", "bfloat16", "bfloat16")),
        (GPUS, ["model.trust_remote_code=true"], (4, True, "embedded", "bfloat16", "bfloat16")),
        (NO_GPU, ["trainer.device=cuda"], (1, True, "embedded", "bfloat16", "bfloat16")),
        (
            GPUS,
            ["trainer.nproc=2", "trainer.tf32=false", "rollout=embedded", "rollout.dtype=float16"],
            (2, False, "embedded", "float16", "bfloat16"),
        ),
        (GPUS, ["recipes=gsm8k_qwen_0.5b", "backend.autocast=none"], (4, True, "vllm", "bfloat16", "none")),
        (GPUS, ["rollout=embedded", "rollout=auto", "backend.autocast=null"], ON_GPUS),
        (GPUS, ["rollout=vllm_server", "rollout.servers.count=2"], (2, True, "vllm_server", "bfloat16", "bfloat16")),
        (GPUS, ["rollout=vllm_server", "rollout.tensor_model_parallel_size=8"], (1, True, "vllm_server", *ON_GPUS[3:])),
        (
            GPUS,
            ["rollout=vllm_server", "rollout.servers.urls=[http://node7:8000]"],
            (4, True, "vllm_server", "bfloat16", "bfloat16"),
        ),
    ],
)
def test_default_settings_on_gpus(machine, overrides, expected):
    assert chosen(composed(machine, *overrides)) == expected


def test_under_torchrun_the_ranks_are_torchrun_s():
    values = {"trainer.device": "auto"}
    environ = {"RANK": "3", "WORLD_SIZE": "16"}
    for machine in (GPUS, NO_GPU):
        assert device_defaults(values.get, machine, environ)["trainer.nproc"] == 16
        assert device_defaults(values.get, machine, environ | {"LOCAL_WORLD_SIZE": "8"})["trainer.nproc"] == 8
    assert device_defaults(values.get, GPUS, {"RANK": "3"})["trainer.nproc"] == 4


def test_resolved_configurations_contain_the_device_defaults():
    config = composed(GPUS)
    assert chosen(from_yaml(to_yaml(config))) == ON_GPUS
    assert "nproc: 4\n" in composition([*BASE, "recipes=null"], Library.find(None), GPUS).commented_yaml()


def test_a_resume_on_another_device_explains_changed_device_defaults():
    diff = compare(composed(GPUS), composed(NO_GPU))
    assert [change.key for change in diff.harmless] == ["trainer.nproc"]
    with pytest.raises(
        UserError, match=r"autocast: bfloat16 in the checkpoint, none now[\s\S]*The device may have changed"
    ):
        reject_changes(diff, allow=False)
    with pytest.raises(UserError) as raised:
        reject_changes(compare(composed(NO_GPU), composed(NO_GPU, "trainer.seed=7")), allow=False)
    assert "The device may have changed" not in str(raised.value)


def test_the_banner_shows_the_device_defaults_and_their_reasons(monkeypatch):
    def shown(machine: Machine, *overrides: str) -> str:
        monkeypatch.setattr(Machine, "here", lambda: machine)
        return next(line for line in banner(composed(machine, *overrides), []).splitlines() if "  device" in line)

    assert shown(NO_GPU).endswith("cpu (no GPU here), 1 rank, backend fsdp2, rollout embedded")
    all_of_it = "cuda (4 GPUs here), 4 ranks, bfloat16 and TF32, backend fsdp2, rollout vllm in bfloat16"
    assert shown(GPUS).endswith(all_of_it)
    defaults = shown(Machine(1, "vLLM is not installed."), "backend.autocast=none", "trainer.tf32=false")
    assert "cuda (1 GPU here), 1 rank, float32, " in defaults
    assert defaults.endswith("rollout embedded in bfloat16 (vLLM is not installed.)")


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, 2), ("0", 1), ("GPU-bbbb", 1), ("1,0", 2), ("", 0), ("-1", 0), ("7", 0), ("MIG-a,MIG-b,MIG-c", 3)],
)
def test_gpus_are_counted_by_the_driver(visible, gpus, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aaaa, 81559\n1, GPU-bbbb, 40536'\n")
    program.chmod(0o755)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    monkeypatch.setattr(devices, "DRIVERS", ("/dev/null",))
    monkeypatch.setattr(devices, "version", lambda _: "2.13.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert count_gpus(environ) == gpus
    program.write_text("#!/bin/sh\nexit 9\n")
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}) == 2
    monkeypatch.setattr(devices, "version", lambda _: "2.13.0+cpu")
    assert count_gpus(environ) == 0
    monkeypatch.undo()
    monkeypatch.setattr(devices, "DRIVERS", ("/dev/no-such-device",))
    assert count_gpus({}) == 0
