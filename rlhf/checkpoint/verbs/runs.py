"""Finds runs and their checkpoints in folders of this machine. Loads no torch."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol, TypeVar

from rlhf.checkpoint.commit.manifest import Manifest, read_manifest
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.checkpoint.verbs.places import REMOVED, Unreadable, read_or_problem
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.stored import stored_sections
from rlhf.errors import UserError
from rlhf.ranks.memory_folder import folders_of, memory_folder
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import CONFIG, POINTER, RESOLVED, scan, set_aside_dirs, step_of
from rlhf.storage.reading import CheckedFiles, read_regular

T = TypeVar("T")
R = TypeVar("R")
RULES = ("max_to_keep", "keep_every", "keep_best", "best_metric")
"""Settings that are retention rules."""
LARGEST_CONFIG = 1 << 20
"""Upper limit of bytes read of a configuration."""
SET_ASIDE = ("damaged", "superseded", "incomplete")
DEEPEST = 4
"""Most levels from the given folder down to a run directory; the trainer creates two, project and experiment."""
MOST_FOLDERS = 100_000
"""Upper limit of folders searched for runs."""
LARGEST_POINTER = 1 << 10


class FoundCheckpoint(Protocol):
    """Reads and verifies one checkpoint, local or remote. Methods raise DamagedCheckpoint or OSError."""

    name: str
    step: int

    def manifest(self) -> Manifest: ...

    def files(self, manifest: Manifest) -> CheckedFiles: ...

    def here(self, manifest: Manifest) -> list[str]:
        """Return the files that must exist on this disk, or in the remote folder."""
        ...

    def is_removed(self) -> bool:
        """Return whether the checkpoint has been removed or replaced since it was found."""
        ...


class LocalCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path, self.name, self.step = path, str(path), step_of(path.absolute()) or 0
        try:
            self._found: tuple[int, int] | None = _identity(path)
        except OSError:
            self._found = None

    def manifest(self) -> Manifest:
        return read_manifest(self.path)

    def files(self, manifest: Manifest) -> CheckedFiles:
        return CheckedFiles(self.path, manifest.files)

    def here(self, manifest: Manifest) -> list[str]:
        return manifest.expected_at(self.path)

    def is_removed(self) -> bool:
        try:
            return self._found not in (None, _identity(self.path))
        except FileNotFoundError:
            return True


def _identity(path: Path) -> tuple[int, int]:
    """Return device and inode, which a later folder of the same name does not have."""
    status = path.stat()
    return status.st_dev, status.st_ino


@dataclass
class FoundRun:
    """Lists one run's checkpoints, newest first; with `single_checkpoint`, one checkpoint only.

    A remote folder has no rules (it does not store `checkpoint.remote_max_to_keep`), no pointer, and no folders set
    aside.
    """

    name: str
    checkpoints: Sequence[FoundCheckpoint]
    single_checkpoint: bool = False

    def rules(self) -> CheckpointConfig | None:
        """Return the retention rules of the newest start, or None if unknown."""
        return None

    def pointer(self) -> str | None:
        """Return the text of the pointer file or its read error; None without a pointer."""
        return None

    def set_aside(self) -> list[tuple[str, str]]:
        """Return reason and name of each folder that was set aside."""
        return []

    def snapshots(self) -> Sequence[FoundCheckpoint]:
        """Return the run's snapshots in this machine's memory, newest first."""
        return []


class LocalRun(FoundRun):
    checkpoints: Sequence[LocalCheckpoint]

    def __init__(self, path: Path, checkpoints: Sequence[Path]) -> None:
        super().__init__(str(path), [LocalCheckpoint(each) for each in checkpoints], list(checkpoints) == [path])
        self.path = path

    def rules(self) -> CheckpointConfig | None:
        text = read_or_problem(self.path, lambda: read_regular(self.path / RESOLVED, LARGEST_CONFIG))
        return None if isinstance(text, str) else parse_rules(text)

    def pointer(self) -> str | None:
        pointer = self.path / POINTER
        text = read_or_problem(self.path, lambda: read_regular(pointer, LARGEST_POINTER).decode().strip())
        return text if pointer.is_file() else None

    def set_aside(self) -> list[tuple[str, str]]:
        return [(reason, path.name) for reason in SET_ASIDE for path in set_aside_dirs(self.path, reason)]

    def snapshots(self) -> Sequence[FoundCheckpoint]:
        return [] if self.single_checkpoint else snapshots_of(self.path)


def snapshots_of(run_dir: Path) -> list[LocalCheckpoint]:
    """Return the snapshots of the run in `run_dir` in this machine's memory, newest first."""
    try:
        stored = stored_sections(read_regular(run_dir / RESOLVED, LARGEST_CONFIG))
        base, run_id = stored["checkpoint"]["memory"]["dir"], read_run_file(run_dir).get("run_id", "")
        folder = memory_folder(base, run_dir, run_id)
    except (OSError, ValueError, TypeError, KeyError, DamagedCheckpoint, UserError):
        return []  # no start has left a readable configuration
    return [LocalCheckpoint(path) for path in scan(folder)] if folder in folders_of(base, run_dir) else []


def read_checkpoint(checkpoint: FoundCheckpoint, look: Callable[[], T]) -> T | Unreadable:
    """Return the result of `look`, or a line about its error; the run may remove `checkpoint` during `look`."""
    found = read_or_problem(Path(checkpoint.name), look)
    if isinstance(found, Unreadable) and read_or_problem(Path(checkpoint.name), checkpoint.is_removed) is True:
        return Unreadable(f"{checkpoint.name} was removed while this command read it", REMOVED)
    return found


def runs_below(root: T, search: Callable[[T], tuple[R | None, Sequence[T]]]) -> list[R]:
    """Return the runs at or below `root`; `search` returns a folder's run, if any, and the subfolders to search."""
    runs: list[R] = []
    level, seen = [root], 0
    for _ in range(DEEPEST + 1):
        below: list[T] = []
        for folder in level:
            seen += 1
            if seen > MOST_FOLDERS:
                raise UserError(f"{root} has more than {MOST_FOLDERS} folders. Give a folder nearer to the runs.")
            run, inside = search(folder)
            runs += [] if run is None else [run]
            below += inside
        level = below
    return runs


def local_runs_below(root: Path) -> tuple[list[LocalRun], list[str]]:
    """Return the runs with checkpoints at or below `root`, and a line per unreadable folder; follow no links."""
    problems: list[str] = []

    def search(folder: Path) -> tuple[LocalRun | None, list[Path]]:
        names = read_or_problem(folder, lambda: _folders(folder) if folder.is_dir() else [])
        if isinstance(names, str):
            problems.append(names)
            return None, []
        if found := scan(folder):
            return LocalRun(folder, found), []
        return None, [folder / name for name in names]

    return sorted(runs_below(root, search), key=lambda run: run.path), problems


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]


def rules_of_save(checkpoint: FoundCheckpoint, manifest: Manifest) -> CheckpointConfig | None:
    """Return the retention rules that a checkpoint was saved with, or None if unknown."""
    if manifest.files.get(CONFIG, {}).get("size", 0) > LARGEST_CONFIG:
        return None
    text = read_checkpoint(checkpoint, lambda: checkpoint.files(manifest).content(CONFIG))
    return None if isinstance(text, str) else parse_rules(text, manifest.release)


def parse_rules(text: bytes, release: str | None = None) -> CheckpointConfig | None:
    """Return the rules in a configuration that `release` resolved, or None if it is damaged."""
    try:
        stored = stored_sections(text, release)["checkpoint"]
        settings = CheckpointConfig(**{name: stored[name] for name in RULES})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    bounds = {field.name: field.metadata for field in fields(CheckpointConfig)}
    for name, value in asdict(settings).items():
        if name not in RULES:
            continue
        may_be_null = name == "best_metric" or bounds[name]["ge"] == 1
        fits = value in bounds[name]["choices"] if name == "best_metric" else type(value) is int
        if not (fits or (may_be_null and value is None)) or (type(value) is int and value < bounds[name]["ge"]):
            return None
    return settings
