"""Verb `merge`: a training checkpoint of any known layout as a Hugging Face folder."""

import argparse

from rich.console import Console

from rlhf.checkpoint.verbs.places import local_folder
from rlhf.convert.verbs.hf_output import add_output_options, tell, to_hf_folder
from rlhf.convert.verbs.origins import add_cpu_option, add_origin_options, check_places, origin_of
from rlhf.errors import UserError

NAME = "merge"
HELP = "make a Hugging Face folder of a training checkpoint, ours or another tool's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `rlhf.checkpoint.__main__.VERBS`. The options are named as verl names them."""
    add_origin_options(parser)
    parser.add_argument(
        "--target_dir", "--target-dir", type=local_folder, required=True, metavar="DIR", help="the folder to write"
    )
    parser.add_argument(
        "--tie-word-embedding",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether input and output embeddings are one (default: as config.json says)",
    )
    parser.add_argument("--is-value-model", action="store_true", help="the model has a head of one number per token")
    add_cpu_option(parser)
    add_output_options(parser)
    parser.add_argument(
        "--hf_upload_path", "--hf-upload-path", metavar="NAME", help="upload it to the Hub as NAME, too"
    )
    parser.add_argument("--private", action="store_true", help="as a private repository")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write the folder and, if asked, upload it."""
    if arguments.private and arguments.hf_upload_path is None:
        raise UserError("--private is for an upload. Give --hf_upload_path NAME, or leave it out.")
    check_places(arguments.local_dir, arguments.hf_model_path, arguments.target_dir, arguments.overwrite)
    from rlhf.models.hf.hf_plan import HfOptions

    if arguments.hf_upload_path is not None:
        from rlhf.convert.huggingface.hub import prepare_repository, upload_folder

        prepare_repository(arguments.hf_upload_path, private=arguments.private)
    options = HfOptions(
        dtype=arguments.dtype,
        shard_bytes=arguments.max_shard_size,
        tied=arguments.tie_word_embedding,
        value_model=arguments.is_value_model,
    )
    target, origin = arguments.target_dir, origin_of(arguments)
    result = to_hf_folder(origin, arguments.backend, options, target, arguments.overwrite)
    if arguments.hf_upload_path is not None:
        from rlhf.convert.huggingface.model_card import card_of

        card = card_of(origin, result["layout"], arguments.hf_upload_path)
        result["uploaded"] = upload_folder(target, arguments.hf_upload_path, private=arguments.private, card=card)
    return tell(result, arguments.json, console)
