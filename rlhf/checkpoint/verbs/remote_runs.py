"""Finds runs in remote folders and reads their checkpoints over the network, as `checkpoint.remote` copied them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlhf.checkpoint.commit.manifest import Manifest, parse_manifest
from rlhf.checkpoint.remote.remote_files import RemoteFiles, call_remote
from rlhf.checkpoint.remote.remote_store import RemoteStore, object_name
from rlhf.checkpoint.remote.retries import Retries, one_line
from rlhf.checkpoint.verbs.runs import FoundRun, runs_below
from rlhf.config.schema.checkpoint import REMOTES
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import MANIFEST, step_dir, step_of
from rlhf.storage.reading import CheckedFiles

T = TypeVar("T")
RETRY_S = 60.0
"""Seconds of retries, and seconds without progress, after which a call fails."""


class RemoteCheckpoint:
    def __init__(self, store: RemoteStore, step: int, retries: Retries) -> None:
        self._store, self._retries = store, retries
        self.step, self.name = step, f"{store.url}/{step_dir(Path(), step).name}"
        self._committed = False

    def manifest(self) -> Manifest:
        """Return the manifest; raise DamagedCheckpoint if it is invalid, and OSError when the network fails."""
        read = partial(self._store.read, object_name(self.step, MANIFEST))
        raw = call_remote(self._retries, f"reading {self.name}", read)
        if raw is None:
            raise DamagedCheckpoint(
                f"{self.name} has no {MANIFEST}: it was never committed, or its copy is in progress"
            )
        self._committed = True
        manifest = parse_manifest(raw, Path(self.name, MANIFEST))
        if manifest.step != self.step:
            raise DamagedCheckpoint(
                f"{self.name}/{MANIFEST} is of step {manifest.step}, but its folder's name has another step"
            )
        return manifest

    def files(self, manifest: Manifest) -> CheckedFiles:
        return RemoteFiles(self._store, self.step, manifest.files, self._retries)

    def here(self, manifest: Manifest) -> list[str]:
        return list(manifest.files)

    def is_removed(self) -> bool:
        """Return whether the checkpoint is gone.

        If `manifest` has read the manifest, check the manifest, which a removal removes first; else check the folder.
        """
        store, read = self._store, partial(self._store.read, object_name(self.step, MANIFEST))
        if self._committed:
            return call_remote(self._retries, f"reading {self.name}", read) is None
        return self.step not in call_remote(self._retries, f"listing {store.url}", store.steps)


def find_remote_runs(url: str) -> tuple[list[FoundRun], list[str]]:
    """Return the runs at `url`, sorted by name, and an empty list of problems; raise UserError without a checkpoint."""
    url = url.rstrip("/")
    retries = Retries(url, stalled_s=RETRY_S, give_up_s=RETRY_S)
    parent, _, last = url.rpartition("/")
    if (step := step_of(Path(last))) is not None:
        store = _call(parent, "opening", partial(RemoteStore, parent), retries)
        if step not in _call(parent, "listing", store.steps, retries):
            raise UserError(f"{url} does not exist. Check the address.")
        found = RemoteCheckpoint(store, step, retries)
        return [FoundRun(found.name, [found], single_checkpoint=True)], []

    def search(folder: str) -> tuple[FoundRun | None, list[str]]:
        store = _call(folder, "opening", partial(RemoteStore, folder), retries)
        if steps := _call(folder, "listing", store.steps, retries):
            return FoundRun(folder, [RemoteCheckpoint(store, step, retries) for step in steps]), []
        names = _call(folder, "listing", store.folders, retries)
        return None, [f"{folder}/{name}" for name in names if not name.startswith(".")]

    runs = runs_below(url, search)
    if not runs:
        raise UserError(
            f"{url} has no checkpoint (global_step_N). Give the remote folder of a run, "
            "<checkpoint.remote>/<project>/<experiment>, or a parent folder."
        )
    return sorted(runs, key=lambda run: run.name), []


def _call(url: str, what: str, action: Callable[[], T], retries: Retries) -> T:
    """Return the result of one try of a network call; raise UserError for any error."""
    try:
        return retries.call(what, action, final=(Exception,))
    except Exception as error:  # object stores' clients raise errors of any class
        package = REMOTES.get(url.partition("://")[0])
        install = f" Install {package}." if package and isinstance(error, ImportError) else ""
        raise UserError(
            f"{url} cannot be read ({one_line(error)}).{install} Check the address, the credentials in the "
            "environment and the network."
        ) from None
