"""Verb `convert`: writes a checkpoint of any layout in another layout, in one process on the CPU.

`merge`, `export` and `import` are aliases that fill in arguments (`rlhf.checkpoint.__main__.ALIASES`).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf.checkpoint.verbs.places import local_folder
from rlhf.convert.verbs.options import add_origin_options, add_weights_options, check_paths
from rlhf.convert.verbs.outputs import print_result, to_hf_folder, to_native_folder, to_other_folder
from rlhf.errors import UserError

if TYPE_CHECKING:
    from rlhf.models.hf.source import Origin

HELP = "convert a checkpoint of any layout to a Hugging Face folder, a native checkpoint, torch DCP or Megatron"
HF, NATIVE, DCP, MEGATRON = "hf", "native", "dcp", "megatron"
ONLY_FOR = {
    "dtype": (HF, DCP, MEGATRON),
    "role": (HF, DCP, MEGATRON),
    "max_shard_size": (HF,),
    "tie_word_embedding": (HF,),
    "is_value_model": (HF,),
    "hf_upload_path": (HF,),
    "tp": (MEGATRON,),
    "pp": (MEGATRON,),
    "megatron_layout": (MEGATRON,),
}
"""Maps options that only some outputs accept to these outputs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `rlhf.checkpoint.__main__.VERBS`. Without SOURCE and `--local_dir`, `--hf_model_path` is the
    source, as in verl."""
    parser.add_argument(
        "source",
        type=local_folder,
        nargs="?",
        metavar="SOURCE",
        help="folder of a checkpoint of any layout, or run directory, whose newest complete checkpoint is read",
    )
    parser.add_argument(
        "target",
        type=local_folder,
        nargs="?",
        metavar="TARGET",
        help="folder to write; --to native needs the name global_step_N, and a new run begins after step N",
    )
    parser.add_argument("--to", choices=(HF, NATIVE, DCP, MEGATRON), help="layout of TARGET")
    add_origin_options(parser)
    parser.add_argument(
        *("--target_dir", "--target-dir", "--output_path", "--output-path"),
        type=local_folder,
        metavar="DIR",
        help="same as TARGET, under verl's name",
    )
    parser.set_defaults(adapter="merge", role=None)
    add_weights_options(parser)
    parser.add_argument(
        "--tie-word-embedding",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether input and output embeddings are tied (default: tie_word_embeddings of config.json)",
    )
    for name, what in (("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} parallel size of Megatron (default: 1)")
    parser.add_argument(
        "--megatron-layout",
        choices=("torch_dist", "mp_rank"),
        help="torch_dist: megatron-core's format, loads at any number of ranks (default); mp_rank: one file per rank",
    )
    parser.add_argument(
        "--hf_upload_path", "--hf-upload-path", metavar="NAME", help="also upload TARGET to the Hub as NAME"
    )
    parser.add_argument("--private", action="store_true", help="upload to a private repository")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it exists")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write TARGET, and upload it if `--hf_upload_path` is set."""
    (source, *parts), target = _paths(arguments)
    _check(arguments)
    check_paths([source, *parts], arguments.hf_model_path, target, arguments.overwrite)
    from rlhf.models.hf.source import Origin

    # A native target gets whole models, which any new run can train. DCP and Megatron have no peft adapters.
    adapter = arguments.adapter if arguments.to == HF else "merge"
    role = arguments.role or "actor"
    origin = Origin(source, arguments.hf_model_path, role, arguments.tag, adapter, tuple(parts))
    if arguments.to == HF:
        made = _to_hf(origin, target, arguments)
    elif arguments.to == NATIVE:
        made = to_native_folder(origin, arguments.backend, target, arguments.overwrite)
    else:
        options: dict[str, Any] = {"dtype": arguments.dtype}
        if arguments.to == MEGATRON:
            given = {"layout": arguments.megatron_layout, "tensor_ranks": arguments.tp, "pipeline_ranks": arguments.pp}
            options |= {name: value for name, value in given.items() if value is not None}
        made = to_other_folder(origin, arguments.backend, arguments.to, options, target, arguments.overwrite)
    return print_result(made, arguments.json, console)


def _paths(arguments: argparse.Namespace) -> tuple[list[Path], Path]:
    sources = [arguments.source] if arguments.source else arguments.local_dir or []
    target = arguments.target or arguments.target_dir
    if not sources and arguments.hf_model_path is not None:
        sources = [arguments.hf_model_path]
    if not sources or target is None:
        raise UserError(
            "Give SOURCE and TARGET, or verl's options for them: --local_dir or --hf_model_path, and --target_dir."
        )
    if None not in (arguments.source, arguments.local_dir):
        raise UserError(
            f"--local_dir={arguments.local_dir[0]} and SOURCE {arguments.source} are both set. Give one source."
        )
    if None not in (arguments.target, arguments.target_dir):
        raise UserError(
            f"--target_dir={arguments.target_dir} and TARGET {arguments.target} are both set. Give one target."
        )
    return sources, target


def _check(arguments: argparse.Namespace) -> None:
    if arguments.to is None:
        raise UserError(f"Give --to, the layout of TARGET: {', '.join((HF, NATIVE, DCP, MEGATRON))}.")
    if arguments.adapter == "keep" and arguments.to != HF:
        raise UserError(f"--adapter=keep is for --to {HF}, not for --to {arguments.to}. Remove it.")
    for name, outputs in ONLY_FOR.items():
        if getattr(arguments, name) not in (None, False) and arguments.to not in outputs:
            option = name if name.startswith("hf_") else name.replace("_", "-")
            raise UserError(f"--{option} is for --to {' or '.join(outputs)}, not for --to {arguments.to}. Remove it.")
    if arguments.private and arguments.hf_upload_path is None:
        raise UserError("--private is for an upload. Give --hf_upload_path NAME, or remove --private.")


def _to_hf(origin: "Origin", target: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from rlhf.models.hf.hf_plan import HfOptions

    repository, private = arguments.hf_upload_path, arguments.private
    if repository is not None:
        from rlhf.convert.huggingface.hub import prepare_repository, upload_folder

        prepare_repository(repository, private=private)
    value_model = arguments.is_value_model or origin.role == "critic"
    options = HfOptions(arguments.dtype, arguments.max_shard_size, arguments.tie_word_embedding, value_model)
    made = to_hf_folder(origin, arguments.backend, options, target, arguments.overwrite)
    if repository is not None:
        from rlhf.convert.huggingface.model_card import card_of

        card = card_of(origin, made["layout"], repository)
        made["uploaded"] = upload_folder(target, repository, private=private, card=card)
    return made
