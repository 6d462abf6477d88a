"""Composes and checks the runs that a scheduler starts later, so that a mistake costs no time in a queue."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.api import check_files, reject_callbacks, validated
from rlhf.cli.sweep import plan
from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.known_settings import SETTINGS
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.config.secrets import export, typed_secrets
from rlhf.errors import UserError
from rlhf.planning.device_defaults import Machine, server_gpus

OF_ARRAY = ("trainer.nnodes", "trainer.nproc", "trainer.device", "trainer.preempt_grace_s")
"""Settings that must be equal in all runs of a sweep, because they determine the options of the array of jobs. The
number of the rollout servers' GPUs must be equal, too."""

_SERVERS = "rollout.servers.count"


@dataclass(frozen=True)
class CheckedRun:
    """A run that passed all checks, and the arguments of `python -m rlhf.train` on each of its machines."""

    config: Config
    arguments: tuple[str, ...]


def checked_runs(
    overrides: Sequence[str], config_dir: Path | None, machine: Machine, *, multirun: bool = False
) -> list[CheckedRun]:
    """Return the run of these overrides, or with `multirun` all runs of the sweep.

    The files that the settings name must exist here: models (of runs on one machine), data and rewards.

    Args:
        machine: the machines of the runs, for device defaults.

    Raises:
        UserError: settings are wrong (the message lists the mistakes of all runs), a file is missing, or the runs of a
            sweep need different machines. Or an argument contains a secret, which the job's file would store.
    """
    library = Library.find(config_dir)
    extra = () if config_dir is None else (f"--config-dir={config_dir.expanduser().absolute()}",)
    if multirun:
        runs = [CheckedRun(each.config, each.overrides) for each in plan(overrides, library, machine)]
    else:
        runs = [CheckedRun(validated(overrides, library, machine=machine), tuple(overrides))]
    for run in runs:
        _reject_ray(run.config)
    for name in (*OF_ARRAY, _SERVERS):
        if len({_of_array(name, run.config) for run in runs}) > 1:
            raise UserError(
                f"-m: the runs differ in {name}, but all jobs of an array have the same machines and options. Submit "
                "one sweep for each of these values."
            )
    for run in runs:
        _check_secrets(run)
        export(run.config)
        if run.config.trainer.nnodes > 1:
            reject_callbacks(run.config)
        check_files(run.config)
    return [CheckedRun(run.config, (*extra, *_with_ranks(run))) for run in runs]


def _of_array(name: str, config: Config) -> Any:
    def value(key: str) -> Any:
        return SETTINGS[key].value(config)

    return server_gpus(value) if name == _SERVERS else value(name)


def _reject_ray(config: Config) -> None:
    if config.launcher.name == "ray":
        raise UserError("launcher.name=ray: the scheduler starts the ranks of this job. Remove launcher=ray.")


def _check_secrets(run: CheckedRun, remedy: str = "") -> None:
    """Raise UserError if an argument contains a secret. `remedy` is a sentence on how the scheduler sets secrets."""
    for setting, (_, secret) in typed_secrets(run.config):
        # Compare names, too: an argument may contain the secret with escapes, or next to an interpolation.
        names = [argument.partition("=")[0].lstrip("+") for argument in run.arguments]
        if any(secret in argument for argument in run.arguments) or any(
            f"{setting}.".startswith(f"{name}.") for name in names
        ):
            raise UserError(
                f"{setting} contains a secret, and the job's file would store it. Put the secret into an environment "
                f"variable of the job, such as NAME, and write '${{oc.env:NAME}}' in its place.{remedy}"
            )


def checked_elsewhere(
    overrides: Sequence[str], config_dir: Path | None, machine: Machine, secret_remedy: str
) -> CheckedRun:
    """Return the run of these overrides, which starts on machines with packages, models and data of their own.

    Args:
        config_dir: the path of the folder on those machines; it must exist here, too.
        machine: describes those machines, for device defaults.
        secret_remedy: a sentence on how the scheduler sets environment variables with secrets.

    Raises:
        UserError: settings are wrong, or an override contains a secret, which the scheduler's file would store.
    """
    config = compose_config(list(overrides), Library.find(config_dir), machine)
    validate(config, {}, here=False, models=False)
    _reject_ray(config)
    if config.trainer.nnodes > 1:
        reject_callbacks(config)
    run = CheckedRun(config, tuple(overrides))
    _check_secrets(run, secret_remedy)
    extra = () if config_dir is None else (f"--config-dir={config_dir}",)
    return CheckedRun(config, (*extra, *_with_ranks(run)))


def _with_ranks(run: CheckedRun) -> tuple[str, ...]:
    """Return the arguments with `trainer.nproc`, so that the machines of the job do not count their devices again."""
    if any(text.startswith("trainer.nproc=") for text in run.arguments):
        return run.arguments
    return (*run.arguments, f"trainer.nproc={run.config.trainer.ranks}")
