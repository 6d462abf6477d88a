"""Finds the runs and checkpoints at a path or URL that a user gives."""

import argparse
from pathlib import Path

from rlhf.checkpoint.verbs.places import checkpoints_at
from rlhf.checkpoint.verbs.runs import FoundRun, LocalRun, local_runs_below, snapshots_of
from rlhf.errors import UserError


def add_address(parser: argparse.ArgumentParser, document: str) -> None:
    """Add the arguments PATH, for `find_runs`, and --json to a verb. `document` describes the JSON document."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a run directory, a global_step_N directory, a folder of many runs, or one of these in a remote folder "
        "(s3://..., gs://..., hdfs://..., file://...)",
    )
    add_json(parser, document)


def add_json(parser: argparse.ArgumentParser, document: str) -> None:
    """Add the argument --json to a verb."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON document: {document}")


def find_runs(address: str, *, in_memory: bool = False) -> tuple[list[FoundRun], list[str]]:
    """Return the runs at `address`, and a line per unreadable folder; raise UserError if there is no checkpoint. With
    `in_memory`, also return a run directory whose run has only snapshots in this machine's memory."""
    if "://" in address:
        from rlhf.checkpoint.verbs.remote_runs import find_remote_runs  # imports fsspec

        return find_remote_runs(address)
    path = Path(address)
    try:
        return [LocalRun(path, checkpoints_at(path))], []
    except UserError:
        found, problems = local_runs_below(path)
        if not found and in_memory and snapshots_of(path):
            return [LocalRun(path, [])], problems
        if not found:
            raise
        return list(found), problems
