"""Verb `push`: uploads a run's newest checkpoint, or a Hugging Face folder, to a model repository of the Hub."""

import argparse
import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf.checkpoint.verbs.places import checkpoints_at, local_folder
from rlhf.convert.verbs.options import add_adapter_option, add_model_files_option, add_weights_options
from rlhf.convert.verbs.outputs import to_hf_folder
from rlhf.errors import EXIT_DONE, UserError
from rlhf.printable import printable

if TYPE_CHECKING:
    from rlhf.models.hf.hf_plan import HfOptions
    from rlhf.models.hf.source import Origin

HELP = "upload a checkpoint, or a merged folder, to the Hugging Face Hub, with a model card"
FOLDERS = ("config.json", "adapter_config.json")
"""A Hugging Face folder has one of these files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=local_folder,
        metavar="RUN_OR_CHECKPOINT",
        help="run directory (its newest complete checkpoint), checkpoint, or Hugging Face folder from merge or export",
    )
    parser.add_argument("repo_id", metavar="REPO_ID", help="repository, NAMESPACE/NAME; created if missing")
    parser.add_argument(
        "--private", action="store_true", help="upload to a private repository; fails if it exists and is public"
    )
    parser.add_argument("--revision", metavar="BRANCH", help="branch; created if missing (default: main)")
    parser.add_argument("--commit-message", metavar="TEXT", help="message of the commit")
    add_adapter_option(parser)
    add_weights_options(parser)
    add_model_files_option(parser)
    parser.add_argument("--json", action="store_true", help="print repository and commit URL as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Check the checkpoint and the permission to upload, merge the weights, and upload."""
    path = arguments.path
    ready = any((path / name).is_file() for name in FOLDERS)
    if ready and (arguments.dtype or arguments.max_shard_size or arguments.hf_model_path or arguments.adapter):
        raise UserError(
            f"{path} is a Hugging Face folder, which is uploaded unchanged: --dtype, --max-shard-size, --adapter and "
            "--hf_model_path are for a checkpoint. Give them to merge or export, or push the checkpoint."
        )
    url, repo_id = _push_folder(arguments) if ready else _push_checkpoint(arguments)
    if arguments.json:
        console.out(json.dumps({"repo_id": repo_id, "commit_url": url}))
    else:
        console.print(printable(f"{path} is on the Hub: {url}"))
    return EXIT_DONE


def _push_folder(arguments: argparse.Namespace) -> tuple[str, str]:
    from rlhf.convert.huggingface.hub import files_to_send, prepare_repository, upload_folder
    from rlhf.convert.huggingface.model_card import bare_card

    folder = arguments.path
    files_to_send(folder)
    repo_id = prepare_repository(arguments.repo_id, **_repository(arguments))
    message = arguments.commit_message or f"Upload {folder.absolute().name}"
    card = bare_card(repo_id)
    return upload_folder(folder, repo_id, **_repository(arguments), message=message, card=card), repo_id


def _push_checkpoint(arguments: argparse.Namespace) -> tuple[str, str]:
    """Merge into a scratch folder, and upload it. If this process is killed, the next push removes the folder."""
    from contextlib import closing

    from rlhf.checkpoint.export.layout_native import NAME as NATIVE
    from rlhf.checkpoint.export.layout_native import open_source
    from rlhf.convert.huggingface.hub import prepare_repository, upload_folder
    from rlhf.convert.huggingface.model_card import card_of
    from rlhf.models.hf.hf_plan import HfOptions
    from rlhf.models.hf.source import Origin
    from rlhf.storage.scratch import Scratch

    checkpoints_at(arguments.path)
    with closing(open_source(Origin(arguments.path, model_files=arguments.hf_model_path))) as source:
        # Select the checkpoint now, because a live run may save a newer checkpoint before the merge.
        origin = Origin(source.path, model_files=arguments.hf_model_path, adapter=arguments.adapter)
        if source.adapted:
            from rlhf.models.hf.adapters import adapter_choice  # imports torch

            adapter_choice(arguments.adapter, source.path)
        message = arguments.commit_message or f"Step {source.manifest.step}"
    repo_id = prepare_repository(arguments.repo_id, **_repository(arguments))
    card = card_of(origin, NATIVE, repo_id)
    options = HfOptions(dtype=arguments.dtype, shard_bytes=arguments.max_shard_size)
    with Scratch(large=True) as scratch:
        folder = scratch.folder / "model"
        _merge(origin, options, folder)
        return upload_folder(folder, repo_id, **_repository(arguments), message=message, card=card), repo_id


def _repository(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"private": arguments.private, "revision": arguments.revision}


def _merge(origin: "Origin", options: "HfOptions", target: Path) -> None:
    try:
        to_hf_folder(origin, "native", options, target)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            f"{target.parents[1]} has no space for the merged model; nothing was uploaded. Set TMPDIR to a folder on a "
            "larger disk, or run merge and push the merged folder."
        ) from None
