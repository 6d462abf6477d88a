"""Options of a verb that say which checkpoint it reads, of whatever layout."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.checkpoint.interop.layouts import AUTO, backends

if TYPE_CHECKING:
    from rlhf.checkpoint.interop.source import Origin


def add_origin_options(parser: argparse.ArgumentParser) -> None:
    """Give a verb the options that `origin_of` takes."""
    add_layout_options(parser)
    parser.add_argument(
        "--local_dir",
        "--local-dir",
        type=Path,
        nargs="+",
        required=True,
        metavar="DIR",
        help="folder of the checkpoint, or a run directory; further ones with parts of it from other nodes' disks",
    )
    parser.add_argument("--role", default="actor", help="model of a checkpoint with several: actor (default), critic")
    parser.add_argument(
        "--adapter", choices=("keep", "merge"), help="a peft adapter: keep it, or merge it into its base"
    )


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Give a verb the options that say how the folder is to be read that it takes."""
    parser.add_argument(
        "--backend", choices=backends(), default=AUTO, help="layout of the checkpoint; auto asks each (default)"
    )
    parser.add_argument(
        "--hf_model_path",
        "--hf-model-path",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder with config and tokenizer, where the checkpoint does not bring them",
    )
    parser.add_argument("--tag", help="save within the folder, for DeepSpeed (default: the one that `latest` names)")


def origin_of(arguments: argparse.Namespace) -> "Origin":
    """The checkpoint that the options name."""
    from rlhf.checkpoint.interop.source import Origin

    first, *parts = arguments.local_dir
    return Origin(
        first,
        model_files=arguments.hf_model_path,
        role=arguments.role,
        tag=arguments.tag,
        adapter=arguments.adapter,
        parts=tuple(parts),
    )
