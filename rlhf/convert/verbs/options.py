"""Defines the options that verbs share: the checkpoint to read, its layout, and how to write its weights."""

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
"""A folder that a verb wrote has at least one of these files at its top. `--overwrite` replaces no other folder: a
folder of several models, for example, has none of these files, and replacing it would delete all models."""


def add_origin_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the options that select the checkpoint to read, under verl's names."""
    parser.add_argument(
        "--local_dir",
        "--local-dir",
        type=local_folder,
        nargs="+",
        required=required,
        metavar="DIR",
        help="folder of the checkpoint, or run directory; more folders if its files are on the disks of several nodes",
    )
    parser.add_argument(
        "--backend", choices=backends(), default=AUTO, help="layout of the checkpoint (default: auto, which detects it)"
    )
    parser.add_argument(
        "--tag", help="which save in a folder of DeepSpeed, torch DCP or Megatron (default: the newest)"
    )
    parser.add_argument(
        "--role",
        default="actor",
        help="model to read: actor (default), critic, or ref, the reference of a native run with ref.update_freq",
    )
    parser.add_argument(
        "--is-value-model", action="store_true", help="the model has a value head, one number per token"
    )
    parser.add_argument(
        "--use_cpu_initialization",
        "--use-cpu-initialization",
        action="store_true",
        help="accepted for compatibility with verl and ignored: all work is on the CPU",
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
        help="Hugging Face folder with config and tokenizer, for a checkpoint without them",
    )


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter",
        choices=("keep", "merge"),
        help="for a LoRA adapter: keep it in peft's format, or merge it into its base model",
    )


def add_weights_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the written weights (default: unchanged)")
    parser.add_argument(
        "--max-shard-size",
        type=byte_size,
        metavar="SIZE",
        help="size limit of one weights file, such as 2GB (default: 5GB)",
    )


def check_paths(
    sources: Iterable[Path], model_files: Path | None = None, target: Path | None = None, overwrite: bool = False
) -> None:
    """Raise UserError for a missing folder or a protected target, before the import of torch, which takes seconds."""
    for source in (sources := list(sources)):
        check_folder(source)
    if model_files is not None and not model_files.is_dir():
        raise UserError(
            f"--hf_model_path={model_files} is not a folder. Give a folder with config and tokenizer; "
            "`hf download NAME --local-dir DIR` downloads a model of the Hub into one."
        )
    if target is not None:
        check_target(target, overwrite, sources)
        if target.is_dir() and any(target.iterdir()) and not any(next(target.glob(name), None) for name in _OUTPUTS):
            raise UserError(
                f"{target} is not the folder of one exported model, so --overwrite does not replace it. Give a folder "
                "in it, or remove it yourself."
            )
