"""Verb `list`: shows a line per checkpoint of one or several run directories. Loads no torch."""

import argparse
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.commit.retention import metric_values, ranking_metric, reasons
from rlhf.checkpoint.verbs.addresses import add_address, find_runs
from rlhf.checkpoint.verbs.places import REMOVED, Unreadable
from rlhf.checkpoint.verbs.runs import RULES, FoundCheckpoint, FoundRun, read_checkpoint, rules_of_save
from rlhf.checkpoint.verbs.shown import facts_of, show_end
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.errors import EXIT_CRASHED, EXIT_DONE
from rlhf.printable import printable
from rlhf.storage.layout import POINTER

HELP = "one line per checkpoint of a run directory, or of all run directories in a folder"

DOCUMENT = (
    "`runs`: `path`, `rules` (null if unknown), `pointer` (null if missing), `set_aside` (`reason`, `name`), "
    "`in_memory` (snapshots, like `checkpoints` without `kept`), `checkpoints`: `path`, `step`, `state` (`committed`, "
    "`damaged`, `other format`, `removed`), `problem` (null or a line), `kept` (reasons; empty: removed after the next "
    "save; null: unknown); if committed `created`, `size` (text), `bytes`, `linked_bytes`, `files`, `ranks`, "
    "`backend`, `contents`, `metrics`"
)
add_arguments = partial(add_address, document=DOCUMENT)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Show steps, sizes, contents and reasons to keep, from manifests and settings; other files are not read."""
    runs, problems = find_runs(arguments.path, in_memory=True)
    documents = []
    for found in runs:
        document = _document(found)
        documents.append(document)
        if not arguments.json:
            if len(runs) > 1:
                console.print(printable(found.name))
            _show(document, console)
    show_end({"runs": documents}, problems, console, in_json=arguments.json)
    rows = [row for document in documents for row in (*document["checkpoints"], *document["in_memory"])]
    unread = any(row["problem"] is not None for row in rows)
    return EXIT_CRASHED if unread or problems else EXIT_DONE


def _document(found: FoundRun) -> dict[str, Any]:
    rules = None if found.single_checkpoint else found.rules()
    rows: list[dict[str, Any]] = []
    for checkpoint in found.checkpoints:
        row, manifest = _row(checkpoint)
        if row["state"] == REMOVED and not found.single_checkpoint:
            continue
        if manifest is not None and rules is None and not found.single_checkpoint:
            rules = rules_of_save(checkpoint, manifest)
        rows.append(row)
    return {
        "path": found.name,
        "rules": None if rules is None else {name: value for name, value in asdict(rules).items() if name in RULES},
        "checkpoints": [row | {"kept": kept} for row, kept in zip(rows, _kept(rows, rules), strict=True)],
        "pointer": found.pointer(),
        "set_aside": [{"reason": reason, "name": name} for reason, name in found.set_aside()],
        "in_memory": [row for each in found.snapshots() if (row := _row(each)[0])["state"] != REMOVED],
    }


def _row(checkpoint: FoundCheckpoint) -> tuple[dict[str, Any], Manifest | None]:
    """Return a row of the document, and the manifest unless it cannot be read."""
    row: dict[str, Any] = {"path": checkpoint.name, "step": checkpoint.step, "problem": None}
    manifest = read_checkpoint(checkpoint, checkpoint.manifest)
    if isinstance(manifest, Unreadable):
        return row | {"state": manifest.state, "problem": manifest}, None
    return row | {"state": "committed"} | facts_of(manifest), manifest


def _kept(rows: list[dict[str, Any]], rules: CheckpointConfig | None) -> list[list[str] | None]:
    """Return the reasons to keep each checkpoint (none: prune may remove it), or None if the rules are unknown."""
    if rules is None:
        return [None] * len(rows)
    found = reasons(metric_values({row["step"]: row.get("metrics") for row in rows}, rules), rules)
    return [found[row["step"]] for row in rows]


def _show(document: dict[str, Any], console: Console) -> None:
    metrics = [row.get("metrics") for row in document["checkpoints"]]
    metric = ranking_metric(metrics, CheckpointConfig(**(document["rules"] or {})))
    names = (
        "step",
        "created (UTC)",
        "size",
        "ranks",
        "backend",
        "contents",
        metric.removeprefix("val/"),
        "kept",
        "state",
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    rows: list[tuple[str, ...]] = []
    for row in document["checkpoints"]:
        kept = "" if row["kept"] is None else ", ".join(row["kept"]) or "may go"
        if row["problem"] is not None:
            state = printable(f"{row['state']}: {row['problem']}")
            rows.append((str(row["step"]), "", "", "", "", "", "", kept, state))
            continue
        created = row["created"].replace("T", " ")[:16]
        cells = (row["step"], created, row["size"], row["ranks"], row["backend"], ", ".join(row["contents"]))
        figure = f"{row['metrics'][metric]:.4f}" if metric in row["metrics"] else ""
        rows.append((*(printable(str(cell)) for cell in cells), figure, kept, "committed"))
    for column, name in enumerate(names):
        words = (word for row in ((name,) * len(names), *rows) for word in row[column].split())
        table.add_column(name, min_width=min(max(map(len, words)), 16))  # rich would break words in a narrow terminal
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if document["pointer"] is not None:
        console.print(printable(f"{POINTER}: {document['pointer']}"))
    for aside in document["set_aside"]:
        console.print(f"set aside as {aside['reason']}: {aside['name']}")
    for row in document["in_memory"]:
        facts = row["problem"] or f"{row['size']}, committed"
        console.print(printable(f"in memory, not saved: {row['path']}: {facts}"))
