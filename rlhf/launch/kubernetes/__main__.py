"""python -m rlhf.launch.kubernetes OVERRIDES: prints the manifest of a run for kubectl apply -f -."""

import argparse
import os
import re
import sys
from pathlib import Path

from rlhf.cli import command
from rlhf.cli.arguments import check_options
from rlhf.cli.command_parser import CommandParser, count_of
from rlhf.cli.submission import checked_elsewhere
from rlhf.config.known_settings import SETTINGS
from rlhf.errors import EXIT_DONE
from rlhf.launch.kubernetes.job_manifest import SHM_SIZE, Pod, check_run_dir, default_name, manifest
from rlhf.planning.device_defaults import Machine, server_gpus

WITH_VALUE = (
    *("--image", "--claim", "--name", "--namespace", "--env-from-secret", "--cpus", "--memory", "--shm-size"),
    *("--backoff-limit", "--config-dir"),
)
_LONGEST_NAME = 40
"""Kubernetes appends indices and random letters, and allows 63 characters."""
_VARIABLE = re.compile(r"\$\{oc\.env:\s*(\w+)\s*\}")
SECRET_REMEDY = " Put NAME into a Secret, and name the Secret in --env-from-secret."


def main(argv: list[str] | None = None) -> int:
    """Print the manifest. Return an exit code of `rlhf.errors`."""
    return command.guarded(_run, argv)


def _run(argv: list[str]) -> int:
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    check_options(argv, ("--help", "-h"), WITH_VALUE)
    # argparse does not accept options between overrides, so put the options first.
    arguments = _parser().parse_args([*(word for word in argv if word not in overrides), *overrides])
    if arguments.env_from_secret:
        for name in _VARIABLE.findall(" ".join(arguments.overrides)):
            os.environ.setdefault(name, "set in the pod")
    # Assume that vLLM can be used: the image has vLLM, even if this machine does not.
    run = checked_elsewhere(arguments.overrides, arguments.config_dir, Machine(1, None), SECRET_REMEDY)
    t = run.config.trainer
    check_run_dir(t)
    gpus = 0 if t.device == "cpu" else t.ranks + server_gpus(lambda key: SETTINGS[key].value(run.config))
    pod = Pod(
        image=arguments.image,
        claim=arguments.claim,
        arguments=run.arguments,
        gpus=gpus,
        secrets=arguments.env_from_secret,
        cpus=arguments.cpus,
        memory=arguments.memory,
        shm_size=arguments.shm_size,
    )
    name = arguments.name or default_name(t.experiment_name, _LONGEST_NAME)
    sys.stdout.write(manifest(pod, t, name, arguments.namespace, arguments.backoff_limit))
    return EXIT_DONE


def _name(text: str) -> str:
    if len(text) > _LONGEST_NAME or not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text} is not a name of at most {_LONGEST_NAME} characters: lower-case letters, digits and dashes, with "
            "a letter first"
        )
    return text


def _object_name(text: str) -> str:
    if len(text) > 253 or not re.fullmatch("[a-z0-9]([-.a-z0-9]*[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid Kubernetes name: lower-case letters, digits, dashes and dots"
        )
    return text


def _image(text: str) -> str:
    if not re.fullmatch(r"[\w.:/@-]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not an image, such as registry/rlhf:tag")
    return text


def _quantity(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*(\.[0-9]+)?(m|[kMGT]|[KMGT]i)?", text):
        raise argparse.ArgumentTypeError(f"{text} is not a Kubernetes quantity, such as 8, 500m or 64Gi")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m rlhf.launch.kubernetes",
        description="Prints a Kubernetes manifest that starts python -m rlhf.train OVERRIDES: a Job, or a JobSet with "
        "trainer.nnodes pods. Each pod has a GPU for each rank (none with trainer.device=cpu).",
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for python -m rlhf.train")
    parser.add_argument(
        "--image", type=_image, required=True, help="image of docker/Dockerfile.cuda or docker/Dockerfile.cpu"
    )
    parser.add_argument(
        "--claim", type=_object_name, required=True, metavar="NAME", help="PersistentVolumeClaim to mount at /work"
    )
    parser.add_argument(
        "--name", type=_name, metavar="NAME", help="name of the Job or JobSet (default: rlhf- and the experiment name)"
    )
    parser.add_argument("--namespace", type=_name, metavar="NAME", help="namespace (default: kubectl's)")
    parser.add_argument(
        "--env-from-secret",
        type=_object_name,
        action="append",
        default=[],
        metavar="NAME",
        help="Secret whose entries become environment variables; may be repeated",
    )
    parser.add_argument("--cpus", type=_quantity, metavar="N", help="CPUs of each pod")
    parser.add_argument("--memory", type=_quantity, metavar="SIZE", help="memory of each pod, such as 64Gi")
    parser.add_argument(
        "--shm-size", type=_quantity, default=SHM_SIZE, metavar="SIZE", help=f"size of /dev/shm (default: {SHM_SIZE})"
    )
    parser.add_argument(
        "--backoff-limit",
        type=count_of("retries"),
        metavar="N",
        help="retries after crashes (default: 3 for a Job, trainer.max_restarts for a JobSet)",
    )
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="as for python -m rlhf.train, in the image")
    return parser


if __name__ == "__main__":
    command.begin()
    sys.exit(main())
