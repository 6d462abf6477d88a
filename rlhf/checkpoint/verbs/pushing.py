"""Verb `push`: a run's newest checkpoint, or a Hugging Face folder, as a model repository of the Hub."""

import argparse
import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rlhf.checkpoint.verbs.hf_output import DTYPES, size_of, to_hf_folder
from rlhf.checkpoint.verbs.places import checkpoints_at
from rlhf.errors import EXIT_DONE, UserError
from rlhf.printable import printable

if TYPE_CHECKING:
    from rlhf.checkpoint.interop.hf_folder import HfOptions
    from rlhf.checkpoint.interop.layout_native import NativeCheckpoint
    from rlhf.checkpoint.interop.source import Origin

NAME = "push"
HELP = "upload a checkpoint, or a merged folder, to the Hugging Face Hub, with a model card"
FOLDERS = ("config.json", "adapter_config.json")
"""Files of which a Hugging Face folder has one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `rlhf.checkpoint.__main__.VERBS`."""
    parser.add_argument(
        "path",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="of a run its newest whole checkpoint; or a Hugging Face folder, such as merge and export write",
    )
    parser.add_argument("repo_id", metavar="REPO_ID", help="the repository, NAMESPACE/NAME; made if it is not there")
    parser.add_argument("--private", action="store_true", help="nobody else sees it; a public one is refused")
    parser.add_argument("--revision", metavar="BRANCH", help="a branch, made if it is not there (main)")
    parser.add_argument("--commit-message", metavar="TEXT", help="of the one commit")
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights; without it each keeps its type")
    parser.add_argument(
        "--max-shard-size", type=size_of, metavar="SIZE", help="most bytes of one file of weights, such as 2GB (5GB)"
    )
    parser.add_argument(
        "--hf_model_path",
        "--hf-model-path",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder with config and tokenizer, should those of the run not be there any more",
    )
    parser.add_argument("--json", action="store_true", help="print the address of the commit as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Ask the Hub first whether it may be done, then merge, then send."""
    from rlhf.checkpoint.interop.hub import prepare_repository

    path = arguments.path
    ready = any((path / name).is_file() for name in FOLDERS)
    if ready and (arguments.dtype or arguments.max_shard_size or arguments.hf_model_path):
        raise UserError(
            f"{path} is a Hugging Face folder, which is sent as it is: --dtype, --max-shard-size and --hf_model_path "
            "are for a checkpoint. Give them to merge or export, or push the checkpoint."
        )
    if not ready:
        checkpoints_at(path)
    repo_id = prepare_repository(arguments.repo_id, private=arguments.private, revision=arguments.revision)
    url = _push_folder(path, repo_id, arguments) if ready else _push_checkpoint(path, repo_id, arguments)
    if arguments.json:
        console.out(json.dumps({"repo_id": repo_id, "commit_url": url}))
    else:
        console.print(printable(f"{path} is on the Hub: {url}"))
    return EXIT_DONE


def _push_folder(folder: Path, repo_id: str, arguments: argparse.Namespace) -> str:
    from rlhf.checkpoint.interop.model_card import bare_card

    return _upload(folder, repo_id, bare_card(repo_id), arguments.commit_message or f"Upload {folder.name}", arguments)


def _push_checkpoint(path: Path, repo_id: str, arguments: argparse.Namespace) -> str:
    """Merge into a scratch folder, which a kill leaves to the next one to remove."""
    from contextlib import closing

    from rlhf.checkpoint.interop.hf_folder import HfOptions
    from rlhf.checkpoint.interop.layout_native import open_source
    from rlhf.checkpoint.interop.source import Origin
    from rlhf.storage.scratch import Scratch

    with closing(open_source(Origin(path, model_files=arguments.hf_model_path))) as source:
        checkpoint = source.path
        card, step = _card(source, repo_id), source.manifest.step
    origin = Origin(checkpoint, model_files=arguments.hf_model_path)
    options = HfOptions(dtype=arguments.dtype, shard_bytes=arguments.max_shard_size)
    with Scratch(large=True) as scratch:
        _merge(origin, options, scratch.folder / "model")
        message = arguments.commit_message or f"Step {step}"
        return _upload(scratch.folder / "model", repo_id, card, message, arguments)


def _card(checkpoint: "NativeCheckpoint", repo_id: str) -> str:
    from rlhf.checkpoint.interop.hub import known_model
    from rlhf.checkpoint.interop.model_card import ModelCard

    card = ModelCard(checkpoint.manifest, checkpoint.files)
    base, license = known_model(card.base_model) if card.base_model else (None, None)
    return card.text(repo_id, base_model=base, license=license)


def _merge(origin: "Origin", options: "HfOptions", target: Path) -> None:
    try:
        to_hf_folder(origin, "native", options, target)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            f"{target.parents[1]} has no room for the merged model, and nothing was sent. Set TMPDIR to a folder that "
            "has, or merge into a folder of yours and push that."
        ) from None


def _upload(folder: Path, repo_id: str, card: str, message: str, arguments: argparse.Namespace) -> str:
    from rlhf.checkpoint.interop.hub import upload_folder

    return upload_folder(
        folder, repo_id, private=arguments.private, revision=arguments.revision, message=message, card=card
    )
