"""Options that verbs share: the checkpoint to read, its layout, and how to write its weights."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from rlhf.checkpoint.commit.output_folder import check_target
from rlhf.checkpoint.verbs.places import local_folder
from rlhf.cli.command_parser import byte_size
from rlhf.convert.layouts import AUTO, backends, check_folder
from rlhf.errors import UserError
from rlhf.storage.layout import MANIFEST

DTYPES = ("float32", "bfloat16", "float16")
_OUTPUTS = ("config.json", "adapter_config.json", "*.safetensors", ".metadata", "mp_rank_*", MANIFEST)
"""Files of which a folder written by a verb has at least one at its top. A folder of several models has none of them:
replacing that folder, instead of one in it, would delete all models."""


def add_origin_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the options that select the checkpoint to read, under verl's names."""
    parser.add_argument(
        "--local_dir",
        "--local-dir",
        type=local_folder,
        nargs="+",
        required=required,
        metavar="DIR",
        help="folder of the checkpoint, or a run directory; further ones with parts of it from other nodes' disks",
    )
    parser.add_argument(
        "--backend", choices=backends(), default=AUTO, help="layout of the checkpoint; auto asks each (default)"
    )
    parser.add_argument(
        "--tag", help="save within the folder, of DeepSpeed, torch DCP or Megatron (default: the newest)"
    )
    parser.add_argument(
        "--role", default="actor", help="actor (default), critic, or ref for a reference of ours that moves"
    )
    parser.add_argument("--is-value-model", action="store_true", help="the model has a head of one number per token")
    parser.add_argument(
        "--use_cpu_initialization",
        "--use-cpu-initialization",
        action="store_true",
        help="accepted as verl's tools take it: all is done on the CPU",
    )
    add_model_files_option(parser)
    add_adapter_option(parser)


def add_model_files_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for checkpoints without config and tokenizer."""
    parser.add_argument(
        "--hf_model_path",
        "--hf-model-path",
        type=local_folder,
        metavar="DIR",
        help="Hugging Face folder with config and tokenizer, where the checkpoint does not bring them",
    )


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", choices=("keep", "merge"), help="an adapter (LoRA): keep it as peft's, or merge it into its base"
    )


def add_weights_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights; without it each keeps its type")
    parser.add_argument(
        "--max-shard-size", type=byte_size, metavar="SIZE", help="most bytes of one file of weights, such as 2GB (5GB)"
    )


def check_paths(
    sources: Iterable[Path], model_files: Path | None = None, target: Path | None = None, overwrite: bool = False
) -> None:
    """Raise UserError for a missing folder or a protected target, before the import of torch, which takes seconds."""
    for source in (sources := list(sources)):
        check_folder(source)
    if model_files is not None and not model_files.is_dir():
        raise UserError(
            f"--hf_model_path={model_files} is no folder. Name one with config and tokenizer; a model of the "
            "Hub is fetched into one by `hf download NAME --local-dir DIR`."
        )
    if target is not None:
        check_target(target, overwrite, sources)
        if target.is_dir() and any(target.iterdir()) and not any(next(target.glob(name), None) for name in _OUTPUTS):
            raise UserError(
                f"{target} holds something other than one exported model, which --overwrite does not replace. Give a "
                "folder in it, or remove it yourself."
            )
