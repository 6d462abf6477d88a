"""Options of a verb that say which checkpoint it reads, of whatever layout."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.checkpoint.commit.output_folder import check_target
from rlhf.checkpoint.verbs.places import local_folder
from rlhf.convert.layouts import AUTO, backends, check_folder
from rlhf.errors import UserError

if TYPE_CHECKING:
    from rlhf.models.hf.source import Origin


def add_origin_options(parser: argparse.ArgumentParser) -> None:
    """Give a verb the options that `origin_of` takes."""
    add_layout_options(parser)
    parser.add_argument(
        "--local_dir",
        "--local-dir",
        type=local_folder,
        nargs="+",
        required=True,
        metavar="DIR",
        help="folder of the checkpoint, or a run directory; further ones with parts of it from other nodes' disks",
    )
    parser.add_argument("--role", default="actor", help="model of a checkpoint with several: actor (default), critic")
    add_adapter_option(parser)


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """Give a verb the option for checkpoints whose weights are an adapter's."""
    parser.add_argument(
        "--adapter", choices=("keep", "merge"), help="an adapter (LoRA): keep it as peft's, or merge it into its base"
    )


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Give a verb the options that say how the folder is to be read that it takes."""
    parser.add_argument(
        "--backend", choices=backends(), default=AUTO, help="layout of the checkpoint; auto asks each (default)"
    )
    parser.add_argument(
        "--hf_model_path",
        "--hf-model-path",
        type=local_folder,
        metavar="DIR",
        help="Hugging Face folder with config and tokenizer, where the checkpoint does not bring them",
    )
    parser.add_argument(
        "--tag", help="save within the folder, of DeepSpeed, torch DCP or Megatron (default: the newest)"
    )


def add_cpu_option(parser: argparse.ArgumentParser) -> None:
    """Give a verb an option that verl's users type."""
    parser.add_argument(
        "--use_cpu_initialization",
        "--use-cpu-initialization",
        action="store_true",
        help="accepted as verl's tools take it: all is done on the CPU",
    )


def check_places(
    sources: Iterable[Path], model_files: Path | None = None, target: Path | None = None, overwrite: bool = False
) -> None:
    """Raise UserError for a folder that is not there and a target that must not be written: before torch is imported,
    which takes seconds."""
    for source in (sources := list(sources)):
        check_folder(source)
    if model_files is not None and not model_files.is_dir():
        raise UserError(
            f"--hf_model_path={model_files} is no folder. Name one with config and tokenizer; a model of the "
            "Hub is fetched into one by `hf download NAME --local-dir DIR`."
        )
    if target is not None:
        check_target(target, overwrite, sources)


def origin_of(arguments: argparse.Namespace) -> "Origin":
    """The checkpoint that the options name."""
    from rlhf.models.hf.source import Origin

    first, *parts = arguments.local_dir
    return Origin(
        first,
        model_files=arguments.hf_model_path,
        role=arguments.role,
        tag=arguments.tag,
        adapter=arguments.adapter,
        parts=tuple(parts),
    )
