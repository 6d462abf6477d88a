"""Reads runs in remote folders, as `checkpoint.remote` has copied them, over the network."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlhf.checkpoint.commit.manifest import Manifest, parse_manifest
from rlhf.checkpoint.remote.remote_files import RemoteFiles, ask
from rlhf.checkpoint.remote.remote_store import RemoteStore, object_name
from rlhf.checkpoint.remote.retries import Retries, one_line
from rlhf.checkpoint.verbs.runs import FoundRun, runs_below
from rlhf.config.schema.checkpoint import REMOTES, CheckpointConfig
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import MANIFEST, step_dir, step_of
from rlhf.storage.reading import CheckedFiles

T = TypeVar("T")
RETRY_S = 60.0
"""Seconds to retry a call, and seconds that a call may make no progress."""


class RemoteCheckpoint:
    def __init__(self, store: RemoteStore, step: int, retries: Retries) -> None:
        self._store, self._retries = store, retries
        self.step, self.name = step, f"{store.url}/{step_dir(Path(), step).name}"

    def manifest(self) -> Manifest:
        """Raises DamagedCheckpoint for an invalid manifest, OSError when the network fails."""
        read = partial(self._store.read, object_name(self.step, MANIFEST))
        raw = ask(self._retries, f"reading {self.name}", read)
        if raw is None:
            raise DamagedCheckpoint(
                f"{self.name} has no {MANIFEST}: it was never committed, or its copy is in progress"
            )
        manifest = parse_manifest(raw, Path(self.name, MANIFEST))
        if manifest.step != self.step:
            raise DamagedCheckpoint(
                f"{self.name}/{MANIFEST} is of step {manifest.step}, but its folder is named for another"
            )
        return manifest

    def files(self, manifest: Manifest) -> CheckedFiles:
        return RemoteFiles(self._store, self.step, manifest.files, self._retries)

    def here(self, manifest: Manifest) -> list[str]:
        return list(manifest.files)


class RemoteRun:
    def __init__(
        self, store: RemoteStore, steps: Sequence[int], retries: Retries, *, single_checkpoint: bool = False
    ) -> None:
        self.single_checkpoint = single_checkpoint
        self._checkpoints = [RemoteCheckpoint(store, step, retries) for step in steps]
        self.name = self._checkpoints[0].name if single_checkpoint else store.url

    @property
    def checkpoints(self) -> Sequence[RemoteCheckpoint]:
        return self._checkpoints

    def rules(self) -> CheckpointConfig | None:
        """Return None: the folder does not store `checkpoint.remote_max_to_keep`, its only retention rule."""
        return None

    def pointer(self) -> str | None:
        """Return None: remote folders have no pointer."""
        return None

    def set_aside(self) -> list[tuple[str, str]]:
        """Return nothing: remote copies are never set aside."""
        return []


def find_remote_runs(url: str) -> tuple[list[FoundRun], list[str]]:
    url = url.rstrip("/")
    retries = Retries(url, stalled_s=RETRY_S, give_up_s=RETRY_S)
    parent, _, last = url.rpartition("/")
    if (step := step_of(Path(last))) is not None:
        store = _open(parent, retries)
        if step not in _list(store, store.steps, retries):
            raise UserError(f"{url} does not exist.")
        return [RemoteRun(store, [step], retries, single_checkpoint=True)], []

    def look(folder: str) -> tuple[FoundRun | None, list[str]]:
        store = _open(folder, retries)
        if steps := _list(store, store.steps, retries):
            return RemoteRun(store, steps, retries), []
        names = _list(store, store.folders, retries)
        return None, [f"{folder}/{name}" for name in names if not name.startswith(".")]

    runs = runs_below(url, look)
    if not runs:
        raise UserError(
            f"{url} has no checkpoint (global_step_N). Give the remote folder of a run, "
            "<checkpoint.remote>/<project>/<experiment>, or a parent folder."
        )
    return sorted(runs, key=lambda run: run.name), []


def _open(url: str, retries: Retries) -> RemoteStore:
    return _call(url, partial(retries.call, "opening", partial(RemoteStore, url), final=(Exception,)))


def _list(store: RemoteStore, listing: Callable[[], list[T]], retries: Retries) -> list[T]:
    return _call(store.url, partial(retries.call, "listing", listing, final=(Exception,)))


def _call(url: str, action: Callable[[], T]) -> T:
    """Return the result of `action`; raises UserError for any error."""
    try:
        return action()
    except Exception as error:  # object stores' clients raise errors of any class
        package = REMOTES.get(url.partition("://")[0])
        install = f" Install {package}." if package and isinstance(error, ImportError) else ""
        raise UserError(
            f"{url} cannot be read ({one_line(error)}).{install} Check the address, the credentials in the "
            "environment and the network."
        ) from None
