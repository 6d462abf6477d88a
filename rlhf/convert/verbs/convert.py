"""Verb `convert`: writes a checkpoint of any layout in another layout, in one process on the CPU.

`merge`, `export` and `import` are aliases that fill in arguments (`rlhf.checkpoint.__main__.ALIASES`).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf.checkpoint.verbs.places import local_folder
from rlhf.convert.verbs.options import add_origin_options, add_weights_options, check_paths
from rlhf.convert.verbs.outputs import report, to_hf_folder, to_native_folder, to_other_folder
from rlhf.errors import UserError

if TYPE_CHECKING:
    from rlhf.models.hf.source import Origin

HELP = "make a Hugging Face folder, a checkpoint of ours, of torch DCP or of Megatron out of any other"
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
"""Outputs that accept an option, for options that some outputs do not accept."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `rlhf.checkpoint.__main__.VERBS`. verl's users know only `--hf_model_path` and `--output_path`."""
    parser.add_argument(
        "source",
        type=local_folder,
        nargs="?",
        metavar="SOURCE",
        help="folder of a checkpoint of any layout; of a run of ours its newest whole checkpoint",
    )
    parser.add_argument(
        "target",
        type=local_folder,
        nargs="?",
        metavar="TARGET",
        help="the folder to write; a checkpoint of ours is FOLDER/global_step_N, and a run begins after N",
    )
    parser.add_argument("--to", choices=(HF, NATIVE, DCP, MEGATRON), help="what TARGET is to be")
    add_origin_options(parser)
    parser.add_argument(
        *("--target_dir", "--target-dir", "--output_path", "--output-path"),
        type=local_folder,
        metavar="DIR",
        help="TARGET, as verl's tools name it",
    )
    parser.set_defaults(adapter="merge", role=None)
    add_weights_options(parser)
    parser.add_argument(
        "--tie-word-embedding",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether input and output embeddings are one (default: as config.json says)",
    )
    for name, what in (("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} parallel ranks of Megatron (1)")
    parser.add_argument(
        "--megatron-layout",
        choices=("torch_dist", "mp_rank"),
        help="torch_dist: megatron-core's, loads at any number of ranks (default); mp_rank: a file for each rank",
    )
    parser.add_argument(
        "--hf_upload_path", "--hf-upload-path", metavar="NAME", help="upload it to the Hub as NAME, too"
    )
    parser.add_argument("--private", action="store_true", help="as a private repository")
    parser.add_argument("--overwrite", action="store_true", help="replace the target if it is there")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write TARGET and, if asked, upload it."""
    (source, *parts), target = _paths(arguments)
    _check(arguments)
    check_paths([source, *parts], arguments.hf_model_path, target, arguments.overwrite)
    from rlhf.models.hf.source import Origin

    # The trainer trains whole models, and none of the other formats has peft adapters.
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
    return report(made, arguments.json, console)


def _paths(arguments: argparse.Namespace) -> tuple[list[Path], Path]:
    sources = [arguments.source] if arguments.source else arguments.local_dir or []
    target = arguments.target or arguments.target_dir
    if not sources and arguments.hf_model_path is not None:
        sources = [arguments.hf_model_path]
    if not sources or target is None:
        raise UserError("Give SOURCE and TARGET, or --local_dir and --target_dir (--hf_model_path and --output_path).")
    if None not in (arguments.source, arguments.local_dir):
        raise UserError(f"--local_dir={arguments.local_dir[0]} and {arguments.source}: give one source.")
    if None not in (arguments.target, arguments.target_dir):
        raise UserError(f"--target_dir={arguments.target_dir} and {arguments.target}: give one target.")
    return sources, target


def _check(arguments: argparse.Namespace) -> None:
    if arguments.to is None:
        raise UserError(f"Give --to, what TARGET is to be: {', '.join((HF, NATIVE, DCP, MEGATRON))}.")
    if arguments.adapter == "keep" and arguments.to != HF:
        raise UserError(f"--adapter=keep is for --to {HF}, not for --to {arguments.to}. Leave it out.")
    for name, known in ONLY_FOR.items():
        if getattr(arguments, name) not in (None, False) and arguments.to not in known:
            option = name if name.startswith("hf_") else name.replace("_", "-")
            raise UserError(f"--{option} is for --to {' or '.join(known)}, not for --to {arguments.to}. Leave it out.")
    if arguments.private and arguments.hf_upload_path is None:
        raise UserError("--private is for an upload. Give --hf_upload_path NAME, or leave it out.")


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
