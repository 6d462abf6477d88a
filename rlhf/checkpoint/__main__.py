"""python -m rlhf.checkpoint list|inspect|verify PATH: what is there, and whether it is whole. Loads no torch."""

import argparse
import os
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console
from rich.table import Table

from rlhf.checkpoint.commit.manifest import Manifest, read_manifest, verify, verify_files
from rlhf.checkpoint.commit.retention import NO_FIGURE, reasons
from rlhf.checkpoint.driver_state import parse_driver_state
from rlhf.config.checkpoint import CheckpointConfig
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import CONFIG, DRIVER_STATE, INDEX, MANIFEST, POINTER, RESOLVED, scan, set_aside_dirs, step_of
from rlhf.storage.reading import CheckedFiles, read_regular

T = TypeVar("T")
RULES = ("max_to_keep", "keep_every", "keep_best", "best_metric")
LARGEST_CONFIG, LARGEST_POINTER = 1 << 20, 1 << 10
"""Bytes that are read of these files of a run directory."""


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when all that was looked at is intact, 1 when something is damaged or cannot be read, 2 for a path
    without checkpoints."""
    parser = argparse.ArgumentParser(prog="python -m rlhf.checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, action, text in (
        ("list", list_checkpoints, "one line per checkpoint of a run directory"),
        ("inspect", inspect, "what one checkpoint holds: roles, tensors, driver state"),
        ("verify", verify_all, "read every byte and compare it with the manifest"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=Path, metavar="PATH", help="a run directory or a global_step_N directory")
        command.set_defaults(action=action)
    arguments = parser.parse_args(argv)
    # Only a terminal has a width to fit into. No markup anywhere: names and texts come from files.
    piped = not sys.stdout.isatty()
    console = Console(highlight=False, markup=False, soft_wrap=piped, width=1000 if piped else None)
    try:
        return arguments.action(arguments.path, console)
    except UserError as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(printable(str(error)))
        return EXIT_USER_ERROR


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or those that the run directory `path` holds, newest first."""
    try:
        if step_of(path.absolute()) is not None and path.is_dir():
            return [path]
        if found := scan(path):
            return found
        # A checkpoint that was copied or set aside under another name.
        if (path / MANIFEST).is_file():
            return [path]
        what = "is no directory" if os.path.lexists(path) else "does not exist"
        what = "holds no checkpoint (global_step_N)" if path.is_dir() else what
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise UserError(
        f"{path} {what}. Give a run directory, <default_local_dir>/<project>/<experiment>, or a checkpoint in it."
    )


def list_checkpoints(path: Path, console: Console) -> int:
    """Steps, sizes, contents and why each is kept, from the manifests and the run's settings; the files themselves are
    not read."""
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
        rows[checkpoint] = [str(m.step), m.created, _sizes(m), str(m.world_size), m.backend, ", ".join(m.contents)]
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


def inspect(path: Path, console: Console) -> int:
    """The newest checkpoint of a run directory, or the one given, in detail."""
    checkpoint = checkpoints_at(path)[0]
    text = looked_at(checkpoint, lambda: list(_details(checkpoint)))
    if isinstance(text, str):
        console.print(printable(text))
        return EXIT_CRASHED
    for line in text:
        console.print(printable(line))
    return EXIT_DONE


def _details(checkpoint: Path) -> list[str]:
    """What `inspect` shows; raises DamagedCheckpoint unless all that it is read from is as committed."""
    from rlhf.storage.shard_index import ShardIndex  # with NumPy, which only this needs

    manifest = read_manifest(checkpoint)
    files = CheckedFiles(checkpoint, manifest.files)
    here = manifest.expected_at(checkpoint)
    if problems := verify_files(checkpoint, manifest, [name for name in here if name.endswith((".json", INDEX))]):
        raise DamagedCheckpoint(f"{checkpoint} is damaged: " + "; ".join(problems))
    facts = {
        "checkpoint": str(checkpoint),
        "step": manifest.step,
        "created": manifest.created,
        "size": f"{_sizes(manifest)} in {len(manifest.files)} files",
        "ranks, backend": f"{manifest.world_size}, {manifest.backend}",
        "contents": ", ".join(manifest.contents),
        "linked": ", ".join(f"{folder} from {source}" for folder, source in manifest.linked.items()) or "nothing",
        "versions": ", ".join(f"{k} {v}" for k, v in sorted(manifest.versions.items())),
    }
    lines = [f"{name:16} {value}" for name, value in facts.items()]
    try:
        lines.append(f"driver state {_bounded(parse_driver_state(files.content(DRIVER_STATE), DRIVER_STATE))}")
        for folder, size in _folders(manifest).items():
            if f"{folder}/{INDEX}" not in here:
                lines.append(f"{folder}: {_size(size)}")
                continue
            index = ShardIndex(files, folder)
            counts = index.counts()
            lines.append(f"{folder}: {_size(size)}, {len(counts)} tensors")
            for name, (dtype, shape) in index.tensors.items():
                lines.append(f"  {name}  {dtype} {list(shape)}  in {counts[name]} shard(s)")
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {error}") from None
    return lines


def verify_all(path: Path, console: Console) -> int:
    """Every checkpoint at `path`, every byte."""
    worst = EXIT_DONE
    for checkpoint in checkpoints_at(path):
        manifest = looked_at(checkpoint, lambda: verify(checkpoint))  # noqa: B023
        if isinstance(manifest, str):
            worst = EXIT_CRASHED
            console.print(printable(manifest))
            continue
        here, files = len(manifest.expected_at(checkpoint)), len(manifest.files)
        what = "intact" if here == files else f"this disk's part is intact ({here} of {files} files)"
        console.print(printable(f"{checkpoint}: {what}, {_sizes(manifest)} in {files} files"))
    return worst


def looked_at(place: Path, look: Callable[[], T]) -> T | str:
    """The result of `look` at `place`, or one line about why there is none."""
    try:
        return look()
    except DamagedCheckpoint as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or place} cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return f"{place} holds a text that is none"


def printable(text: str) -> str:
    """`text` for a terminal, on which what names and texts of other people's files say must have no effect."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _bounded(state: dict[str, Any]) -> str:
    shown = reprlib.Repr()
    shown.maxlevel, shown.maxdict, shown.maxlist, shown.maxstring, shown.maxother = 8, 100, 100, 200, 200
    return shown.repr(state)


def _folders(manifest: Manifest) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, entry in manifest.files.items():
        folder = str(Path(name).parent)
        sizes[folder] = sizes.get(folder, 0) + entry["size"]
    return dict(sorted(sizes.items()))


def _sizes(manifest: Manifest) -> str:
    linked = f" and {_size(manifest.linked_bytes)} linked" if manifest.linked else ""
    return _size(manifest.total_bytes) + linked


def _size(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
