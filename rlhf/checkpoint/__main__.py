"""python -m rlhf.checkpoint list|inspect|verify PATH: what is there, and whether it is whole. Loads no torch."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from rlhf.checkpoint.commit.manifest import Manifest, read_manifest, verify, verify_files
from rlhf.checkpoint.commit.retention import NO_FIGURE, reasons
from rlhf.config.checkpoint import CheckpointConfig
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import CONFIG, DRIVER_STATE, POINTER, RESOLVED, scan, set_aside_dirs, step_of

RULES = ("max_to_keep", "keep_every", "keep_best", "best_metric")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when all that was looked at is intact, 1 when something is damaged, 2 for a path without
    checkpoints."""
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
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(str(error))
        return EXIT_USER_ERROR


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or those that the run directory `path` holds, newest first."""
    if step_of(path.absolute()) is not None and path.is_dir():
        return [path]
    if found := scan(path):
        return found
    # A checkpoint that was copied or set aside under another name.
    if (path / "manifest.json").is_file():
        return [path]
    what = "holds no checkpoint (global_step_N)" if path.is_dir() else "does not exist"
    raise UserError(
        f"{path} {what}. Give a run directory, <default_local_dir>/<project>/<experiment>, or a checkpoint in it."
    )


def list_checkpoints(path: Path, console: Console) -> int:
    """Steps, sizes, contents and why each is kept, from the manifests and the run's settings; the files themselves are
    not read."""
    found: dict[Path, Manifest | DamagedCheckpoint] = {}
    for checkpoint in checkpoints_at(path):
        try:
            found[checkpoint] = read_manifest(checkpoint)
        except DamagedCheckpoint as error:
            found[checkpoint] = error
    settings = _settings(path, found)
    metric = (settings or CheckpointConfig()).best_metric
    figures = {
        step_of(checkpoint) or 0: m.metrics.get(metric, NO_FIGURE) if isinstance(m, Manifest) else None
        for checkpoint, m in found.items()
    }
    why = {} if settings is None else reasons(figures, settings)
    table = Table("step", "created (UTC)", "size", "ranks", "backend", "contents", metric, "kept", "state")
    for checkpoint, m in found.items():
        step = step_of(checkpoint) or 0
        kept = ", ".join(why[step]) or "may go" if step in why else ""
        if isinstance(m, DamagedCheckpoint):
            table.add_row(str(step), "", "", "", "", "", "", kept, f"damaged: {m}")
            continue
        figure = f"{m.metrics[metric]:.4f}" if metric in m.metrics else ""
        contents = ", ".join(m.contents)
        table.add_row(
            str(m.step), m.created, _sizes(m), str(m.world_size), m.backend, contents, figure, kept, "committed"
        )
    console.print(table)
    if (path / POINTER).is_file():
        console.print(f"{POINTER}: {(path / POINTER).read_text().strip()}")
    for reason in ("damaged", "superseded", "incomplete"):
        for directory in set_aside_dirs(path, reason):
            console.print(f"set aside as {reason}: {directory.name}")
    return EXIT_CRASHED if any(isinstance(m, DamagedCheckpoint) for m in found.values()) else EXIT_DONE


def _settings(run_dir: Path, found: Mapping[Path, Manifest | DamagedCheckpoint]) -> CheckpointConfig | None:
    """What decides on the checkpoints of a run directory: the settings of its newest start, or of its newest save; None
    if unknown."""
    if not scan(run_dir):  # a single checkpoint, which knows nothing of its neighbours
        return None
    saved = (
        p / CONFIG
        for p, m in found.items()
        if isinstance(m, Manifest) and CONFIG in m.files and not verify_files(p, m, [CONFIG])
    )
    for path in (run_dir / RESOLVED, *saved):
        try:
            stored = yaml.safe_load(path.read_text())["checkpoint"]
            return CheckpointConfig(**{name: stored[name] for name in RULES})
        except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
            # Of an older version, or no longer what was written.
            continue
    return None


def inspect(path: Path, console: Console) -> int:
    """The newest checkpoint of a run directory, or the one given, in detail."""
    checkpoint = checkpoints_at(path)[0]
    try:
        manifest = read_manifest(checkpoint)
        # What is shown below is read from these.
        if problems := verify_files(
            checkpoint, manifest, [name for name in manifest.expected_at(checkpoint) if name.endswith(".json")]
        ):
            raise DamagedCheckpoint(f"{checkpoint} is damaged: " + "; ".join(problems))
    except DamagedCheckpoint as error:
        console.print(str(error))
        return EXIT_CRASHED
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
    for name, value in facts.items():
        console.print(f"{name:16} {value}")
    console.print("driver state", json.loads((checkpoint / DRIVER_STATE).read_text()))
    for folder, size in _folders(manifest).items():
        index = checkpoint / folder / "index.json"
        if not index.is_file():
            console.print(f"{folder}: {_size(size)}")
            continue
        tensors = json.loads(index.read_text())
        console.print(f"{folder}: {_size(size)}, {len(tensors)} tensors")
        for name, entry in tensors.items():
            console.print(f"  {name}  {entry['dtype']} {entry['shape']}  in {len(entry['shards'])} shard(s)")
    return EXIT_DONE


def verify_all(path: Path, console: Console) -> int:
    """Every checkpoint at `path`, every byte."""
    worst = EXIT_DONE
    for checkpoint in checkpoints_at(path):
        try:
            manifest = verify(checkpoint)
            here, files = len(manifest.expected_at(checkpoint)), len(manifest.files)
            what = "intact" if here == files else f"this disk's part is intact ({here} of {files} files)"
            console.print(f"{checkpoint}: {what}, {_sizes(manifest)} in {files} files")
        except DamagedCheckpoint as error:
            worst = EXIT_CRASHED
            console.print(str(error))
    return worst


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
