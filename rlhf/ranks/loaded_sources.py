"""Checks whether files that this process has imported have changed since."""

import sys
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_SITES = ("site-packages", "dist-packages")
_INSTALLED = (".dist-info", ".egg-info")

Mark = tuple[int, int, int] | None
"""Inode, size and time of the last change of a file; None if the file does not exist."""


class LoadedSources:
    """Stores marks of the trainer's own files, of all loaded modules' files, and of the installed distributions.

    Create this object before the imports, and call `add_modules` after them. Then `problem` also finds a change of the
    trainer or of a distribution that happened during the imports.
    """

    def __init__(self) -> None:
        self._files, self._installed = dict(_own()), dict(_installed())

    def add_modules(self) -> None:
        for module in list(sys.modules.values()):
            if name := getattr(module, "__file__", None):
                path = Path(name)
                self._files.setdefault(path, _mark(path))

    def problem(self) -> str | None:
        """Return the reason why a fork of this process would mix old and new code; None if nothing has changed."""
        changed = next((path for path, mark in self._files.items() if _mark(path) != mark), None)
        if changed is None:
            differing = self._installed.items() ^ set(_installed())
            changed = min((path for path, _ in differing), default=None)
        return None if changed is None else f"{changed} has changed since the launcher imported its modules"


def code_on_disk() -> list[tuple[str, Mark]]:
    """Return the marks of the trainer's own files and of the installed distributions, sorted."""
    return sorted((str(path), mark) for path, mark in [*_own(), *_installed()])


def _own() -> Iterator[tuple[Path, Mark]]:
    yield from ((path, _mark(path)) for path in _PACKAGE.rglob("*.py"))


def _installed() -> Iterator[tuple[Path, Mark]]:
    """Yield the metadata folders of the installed distributions. Each installation creates a new folder."""
    for folder in map(Path, dict.fromkeys(sys.path)):
        if folder.name in _SITES and folder.is_dir():
            yield from ((path, _mark(path)) for path in folder.iterdir() if path.suffix in _INSTALLED)


def _mark(path: Path) -> Mark:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
