"""Verb `export`: the newest whole checkpoint of a run as a Hugging Face folder."""

import argparse

from rich.console import Console

from rlhf.checkpoint.verbs.places import local_folder
from rlhf.convert.verbs.hf_output import add_output_options, tell, to_hf_folder
from rlhf.convert.verbs.origins import add_adapter_option, check_places

NAME = "export"
HELP = "make a Hugging Face folder of one of our runs or checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `rlhf.checkpoint.__main__.VERBS`."""
    parser.add_argument(
        "path", type=local_folder, metavar="RUN_OR_CHECKPOINT", help="of a run its newest whole checkpoint"
    )
    parser.add_argument("target", type=local_folder, metavar="TARGET", help="the folder to write")
    parser.add_argument("--role", default="actor", help="actor (default), critic, or ref for a reference that moves")
    parser.add_argument(
        "--hf_model_path",
        "--hf-model-path",
        type=local_folder,
        metavar="DIR",
        help="Hugging Face folder with config and tokenizer, should those of the run not be there any more",
    )
    add_adapter_option(parser)
    add_output_options(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write the folder."""
    check_places([arguments.path], arguments.hf_model_path, arguments.target, arguments.overwrite)
    from rlhf.models.hf.hf_plan import HfOptions
    from rlhf.models.hf.source import Origin

    origin = Origin(arguments.path, model_files=arguments.hf_model_path, role=arguments.role, adapter=arguments.adapter)
    options = HfOptions(dtype=arguments.dtype, shard_bytes=arguments.max_shard_size)
    result = to_hf_folder(origin, "native", options, arguments.target, arguments.overwrite)
    return tell(result, arguments.json, console)
