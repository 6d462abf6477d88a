"""python -m rlhf.plan OVERRIDES: shows the memory, disk and tokens that python -m rlhf.train OVERRIDES would need."""

import argparse
import json
import os
import sys
from pathlib import Path

from rlhf.cli.arguments import check_options
from rlhf.cli.command_parser import CommandParser, byte_size, count_of
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.redaction import Redaction
from rlhf.config.rules.validate import validate
from rlhf.config.vllm_versions import installation_problem
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.planning.adapter_check import check_adapters
from rlhf.planning.check import check_heads, models_of, target_of
from rlhf.planning.combination import combination
from rlhf.planning.device_defaults import Machine
from rlhf.planning.memory_plan import memory_plan
from rlhf.planning.plan_text import plan_document, plan_page
from rlhf.planning.remedies import remedies
from rlhf.printable import printable_output, write_error

FLAGS = ("--json", "--help", "-h")
WITH_VALUE = ("--ranks", "--device-memory", "--disk-speed", "--config-dir")
SYNONYMS = {
    **dict.fromkeys(("devices", "gpus", "n-gpus", "num-devices", "num-gpus", "num-processes", "world-size"), "--ranks"),
    **dict.fromkeys(("gpu-memory", "memory", "vram"), "--device-memory"),
}
"""Maps names that users may type by mistake to the option that they mean."""
DISK_SPEED = 1_000_000_000
"""Bytes per second, the default of --disk-speed."""
DOES_NOT_FIT = 1
"""Exit code if the run needs more memory than the devices have."""


def main(argv: list[str] | None = None) -> int:
    """Print the plan. Return the exit code: 0 if the run fits, 1 if it does not, 2 for a mistake in the arguments."""
    words = sys.argv[1:] if argv is None else argv
    # argparse does not accept options between overrides, so put the options first.
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    try:
        check_options(words, FLAGS, WITH_VALUE, SYNONYMS)
        arguments = _parser().parse_args([*(word for word in words if word not in overrides), *overrides])
        library = Library.find(arguments.config_dir)
        config = compose_config(arguments.overrides, library, _machine(arguments))
        ranks = arguments.ranks or config.trainer.nnodes * config.trainer.ranks
        validate(config, {"RANK": "0", "WORLD_SIZE": str(ranks)} if arguments.ranks else {}, here=False)
        models = models_of(config, from_config=True)
        assert models is not None
        check_adapters(config.model, models.policy)
        check_heads(config, models.policy)
    except UserError as error:
        write_error(Redaction(os.environ)(printable_output(str(error))))
        return EXIT_USER_ERROR
    plan = memory_plan(config, models, target_of(config, arguments.device_memory, ranks))
    found = remedies(config, models, plan)
    together = None if plan.fits else combination(config, models, plan)
    if arguments.json:
        text = json.dumps(plan_document(models, plan, found, arguments.disk_speed, together), indent=1) + "\n"
    else:
        text = plan_page(config.rollout, models, plan, found, arguments.disk_speed, together, overrides)
    sys.stdout.write(text)
    return EXIT_DONE if plan.fits else DOES_NOT_FIT


def _machine(arguments: argparse.Namespace) -> Machine:
    """Return the machine for the device defaults: this machine, or the GPUs that the arguments describe."""
    here = Machine.here()
    if arguments.device_memory is None:
        return here
    return Machine(arguments.ranks or here.gpus or 1, installation_problem())


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m rlhf.plan", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for python -m rlhf.train")
    parser.add_argument(
        "--ranks",
        type=count_of("ranks", 1),
        metavar="N",
        help="ranks (one per GPU) on all machines together, as torchrun's WORLD_SIZE (default: trainer.nnodes * nproc)",
    )
    parser.add_argument(
        "--device-memory",
        type=byte_size,
        metavar="SIZE",
        help="memory of each GPU, such as 80GB (default: this machine's devices)",
    )
    parser.add_argument(
        "--disk-speed",
        type=byte_size,
        default=DISK_SPEED,
        metavar="SIZE",
        help="bytes written per second (default: 1GB)",
    )
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="as for python -m rlhf.train")
    parser.add_argument("--json", action="store_true", help="print a JSON document; sizes are in bytes")
    return parser
