"""Checks the installed packages against the versions that rlhf requires. Imports none of the packages."""

from collections.abc import Iterable, Iterator, Mapping, Set
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from rlhf.config import BackendConfig, CheckpointConfig, RolloutConfig, TrainerConfig
from rlhf.config.vllm_versions import NAMES as VLLM
from rlhf.config.vllm_versions import installation_problem
from rlhf.diagnosis.check_result import Outcome, error, ok, warning

PACKAGE = "rlhf"
SHOWN = ("torch", "transformers", "deepspeed", *VLLM, "ray")
_OF_REMOTES = {"s3": "s3", "gs": "gcs"}


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages in `names` that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def used_extras(
    trainer: TrainerConfig, backend: BackendConfig, rollout: RolloutConfig, checkpoint: CheckpointConfig
) -> set[str]:
    """Return the optional dependencies of `pyproject.toml` that a run with these settings imports."""
    used = set(trainer.logger)
    used |= {backend.name, "liger" if backend.use_liger else ""}
    if rollout.name == "vllm" or (rollout.name == "vllm_server" and not rollout.servers.urls):
        used.add("vllm")
    used.add(_OF_REMOTES.get((checkpoint.remote or "").partition("://")[0], ""))
    return used


def check_versions(used: Set[str]) -> Iterator[Outcome]:
    """Check all required packages, and the optional packages that are installed or belong to the extras `used`."""
    try:
        texts = requires(PACKAGE) or []
    except PackageNotFoundError:
        yield warning(f"{PACKAGE} is not installed, so its requirements are unknown. Run pip install -e . here.")
        return
    requirements = [Requirement(text) for text in texts]
    found = list(version_problems(requirements, installed_versions(each.name for each in requirements), used))
    if "vllm" in used and (problem := installation_problem()):
        found.append(error(problem))
    yield from found
    if not found:
        shown = installed_versions(SHOWN)
        yield ok(", ".join(f"{name} {number}" for name, number in shown.items()))


def version_problems(
    requirements: Iterable[Requirement], installed: Mapping[str, str], used: Set[str]
) -> Iterator[Outcome]:
    """Yield a finding for each requirement that the `installed` versions do not satisfy: an error if a run needs the
    package, a warning for a package that the run does not use."""
    for requirement in requirements:
        extra = next((name for name in _extras_of(requirement) if name != "dev"), None)
        of_dev = extra is None and requirement.marker is not None
        if of_dev or requirement.name in (PACKAGE, *VLLM):  # vLLM has a check of its own
            continue
        needed = extra is None or extra in used
        number = installed.get(requirement.name)
        install = f"pip install '{requirement.name}{requirement.specifier}'"
        if number is None:
            if needed:
                yield error(f"{requirement.name} is not installed. Run {install}.")
        elif not requirement.specifier.contains(number, prereleases=True):
            level = error if needed else warning
            yield level(
                f"{requirement.name} {number} is installed, and {requirement.specifier} is needed. Run {install}."
            )


def _extras_of(requirement: Requirement) -> Iterator[str]:
    """Yield the names of extras in the marker of a requirement, such as `extra == "s3"`."""
    marker = str(requirement.marker or "")
    for part in marker.split("extra == ")[1:]:
        yield part.strip("'\"() ").split("'")[0].split('"')[0]
