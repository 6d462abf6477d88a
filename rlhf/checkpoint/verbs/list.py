"""Verb `list`: one line per checkpoint of a run directory. Loads no torch."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from rlhf.checkpoint.commit.manifest import Manifest, read_manifest
from rlhf.checkpoint.commit.retention import NO_FIGURE, reasons
from rlhf.checkpoint.verbs.places import add_path, checkpoints_at, looked_at
from rlhf.checkpoint.verbs.shown import printable, sizes_of
from rlhf.config.checkpoint import CheckpointConfig
from rlhf.errors import EXIT_CRASHED, EXIT_DONE
from rlhf.storage.layout import CONFIG, POINTER, RESOLVED, set_aside_dirs, step_of
from rlhf.storage.reading import CheckedFiles, read_regular

NAME = "list"
HELP = "one line per checkpoint of a run directory"
RULES = ("max_to_keep", "keep_every", "keep_best", "best_metric")
LARGEST_CONFIG, LARGEST_POINTER = 1 << 20, 1 << 10
"""Bytes that are read of these files of a run directory."""

add_arguments = add_path


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Steps, sizes, contents and why each is kept, from the manifests and the run's settings; the files themselves are
    not read."""
    path = arguments.path
    checkpoints = checkpoints_at(path)
    settings = _settings_of_start(path)
    rows: dict[Path, list[str]] = {}
    metrics: dict[int, Mapping[str, float] | None] = {}
    damaged = False
    for checkpoint in checkpoints:
        manifest = looked_at(checkpoint, lambda: read_manifest(checkpoint))  # noqa: B023
        if isinstance(manifest, str):
            damaged, rows[checkpoint], metrics[step_of(checkpoint) or 0] = True, [manifest], None
            continue
        settings = settings or _settings_of_save(checkpoint, manifest)
        # Not the manifest itself: a thousand of them, each with all of its files, would be much to hold.
        m = manifest
        rows[checkpoint] = [str(m.step), m.created, sizes_of(m), str(m.world_size), m.backend, ", ".join(m.contents)]
        metrics[step_of(checkpoint) or 0] = m.metrics
    # A single checkpoint knows nothing of its neighbours.
    settings = settings if checkpoints != [path] else None
    _show(rows, metrics, settings, console)
    pointer = looked_at(path, lambda: read_regular(path / POINTER, LARGEST_POINTER).decode().strip())
    if (path / POINTER).is_file():
        console.print(printable(f"{POINTER}: {pointer}"))
    for reason in ("damaged", "superseded", "incomplete"):
        for directory in set_aside_dirs(path, reason):
            console.print(f"set aside as {reason}: {directory.name}")
    return EXIT_CRASHED if damaged else EXIT_DONE


def _show(
    rows: Mapping[Path, list[str]],
    metrics: Mapping[int, Mapping[str, float] | None],
    settings: CheckpointConfig | None,
    console: Console,
) -> None:
    """A table of `rows`: the columns that a manifest fills, or what is wrong with it."""
    metric = (settings or CheckpointConfig()).best_metric
    figures = {step: None if known is None else known.get(metric, NO_FIGURE) for step, known in metrics.items()}
    why = {} if settings is None else reasons(figures, settings)
    table = Table("step", "created (UTC)", "size", "ranks", "backend", "contents", metric, "kept", "state")
    for checkpoint, cells in rows.items():
        step = step_of(checkpoint) or 0
        kept = ", ".join(why[step]) or "may go" if step in why else ""
        if (known := metrics[step]) is None:
            table.add_row(str(step), "", "", "", "", "", "", kept, printable(f"damaged: {cells[0]}"))
        else:
            figure = f"{known[metric]:.4f}" if metric in known else ""
            table.add_row(*map(printable, cells), figure, kept, "committed")
    console.print(table)


def _settings_of_start(run_dir: Path) -> CheckpointConfig | None:
    """What decides on the checkpoints of a run directory by the settings of its newest start; None if unknown."""
    text = looked_at(run_dir, lambda: read_regular(run_dir / RESOLVED, LARGEST_CONFIG))
    return None if isinstance(text, str) else _rules(text)


def _settings_of_save(checkpoint: Path, manifest: Manifest) -> CheckpointConfig | None:
    """The same by those that a checkpoint was saved with."""
    if manifest.files.get(CONFIG, {}).get("size", 0) > LARGEST_CONFIG:
        return None
    text = looked_at(checkpoint, lambda: CheckedFiles(checkpoint, manifest.files).content(CONFIG))
    return None if isinstance(text, str) else _rules(text)


def _rules(text: bytes) -> CheckpointConfig | None:
    try:
        stored = yaml.safe_load(text)["checkpoint"]
        settings = CheckpointConfig(**{name: stored[name] for name in RULES})
    except (ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError):
        # Of an older version, or no longer what was written.
        return None
    bounds = {field.name: field.metadata for field in fields(CheckpointConfig)}
    for name, value in asdict(settings).items():
        if name not in RULES:
            continue
        may_be_null = bounds[name]["ge"] == 1
        fits = value in bounds[name]["choices"] if name == "best_metric" else type(value) is int
        if not (fits or (may_be_null and value is None)) or (type(value) is int and value < bounds[name]["ge"]):
            return None
    return settings
