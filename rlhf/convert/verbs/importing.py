"""Verb `import`: a checkpoint of another tool becomes the start of a new run."""

import argparse

from rich.console import Console

from rlhf.checkpoint.verbs.places import local_folder
from rlhf.convert.verbs.native_output import tell_start, to_native_folder
from rlhf.convert.verbs.origins import add_layout_options, check_places

NAME = "import"
HELP = "a checkpoint of another tool becomes the start of a new run: weights, moments, step and place in the schedule"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `rlhf.checkpoint.__main__.VERBS`."""
    parser.add_argument("source", type=local_folder, metavar="SOURCE", help="folder of a checkpoint of another tool")
    parser.add_argument(
        "target",
        type=local_folder,
        metavar="TARGET",
        help="the folder to write, FOLDER/global_step_N: a run begins after N",
    )
    add_layout_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the target if it is there")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write TARGET and say what came along, what did not, and how a run begins at it."""
    check_places([arguments.source], arguments.hf_model_path, arguments.target, arguments.overwrite)
    from rlhf.models.hf.source import Origin

    # The trainer trains whole models: an adapter goes into its base.
    origin = Origin(arguments.source, arguments.hf_model_path, tag=arguments.tag, adapter="merge")
    result = to_native_folder(origin, arguments.backend, arguments.target, arguments.overwrite)
    return tell_start(result, arguments.json, console)
