"""Records changes of files below a folder: every write, truncation, sync, and change of a name, in order.

The recorder replaces the calls of `os` and `io` that change files. Python's audit events reveal other calls that open
files for writing or change names. A final byte-for-byte comparison of record and folder reveals all other writes.
"""

import builtins
import io
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import rlhf
from rlhf.storage import files

HOUSE = str(Path(rlhf.__file__).parent)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Site = tuple[str, int, int]
"""A call in the code: file below `rlhf/`, line and column."""


@dataclass(frozen=True)
class Op:
    """One change: `kind` is create, write, truncate, sync, sync_dir, mkdir, rename, exchange, link, unlink or
    rmdir.

    Paths are relative to the recorded folder. `offset` is the position of `data`, or the new size of a truncated file.
    `sites` are the calls on the stack of a sync, innermost first.
    """

    kind: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""
    sites: tuple[Site, ...] = ()


class Recorder:
    """Records the operations below `root`, an absolute path without links."""

    def __init__(self, root: Path) -> None:
        self.root, self.ops = str(root), list[Op]()
        self.missed: list[str] = []
        """Changes in Python's audit events that were not recorded."""
        self.lock = threading.RLock()
        self.inside = threading.local()

    def below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return `path` relative to the folder, or None if it is outside."""
        if isinstance(path, int):
            full = str(Path(f"/proc/self/fd/{path}").readlink())
        else:
            base = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
            full = os.path.normpath(base / os.fsdecode(path))
        return full[len(self.root) + 1 :] if f"{full}/".startswith(f"{self.root}/") else None

    def add(self, kind: str, path: str, other: str = "", offset: int = 0, data: bytes = b"") -> None:
        self.ops.append(Op(kind, path, other, offset, data, _sites() if kind.startswith("sync") else ()))

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Keep a call and its record together, so that the record has the order of the calls."""
        with self.lock:
            self.inside.depth = getattr(self.inside, "depth", 0) + 1
            try:
                yield
            finally:
                self.inside.depth -= 1

    def heard(self, event: str, arguments: tuple) -> None:
        """Handle an audit event of any thread."""
        if getattr(self.inside, "depth", 0):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
            return
        descriptors = [value for value in arguments[1:] if isinstance(value, int) and value > 2 and event != "open"]
        for path in arguments[: 2 if event in _OF_TWO else 1]:
            if isinstance(path, str | bytes | os.PathLike | int):
                relative = self.below(path, descriptors[0] if descriptors and event != "os.truncate" else None)
                if relative is not None:
                    self.missed.append(f"{event} {relative}")


def _sites() -> tuple[Site, ...]:
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(HOUSE):
            line, column = _position(frame.f_code, frame.f_lasti)
            found.append((frame.f_code.co_filename[len(HOUSE) + 1 :], line, column))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def _position(code: CodeType, instruction: int) -> tuple[int, int]:
    line, _, column, _ = list(code.co_positions())[instruction // 2]
    return line or 0, column or 0


class _RecordedRaw(io.FileIO):
    """A file open for writing."""

    recorder: Recorder

    def write(self, data: Any) -> int:
        with self.recorder.one_call():
            end = "a" in self.mode or self._append
            offset = os.fstat(self.fileno()).st_size if end else self.tell()
            count = super().write(data)
            path = self.recorder.below(self.fileno())
            if path is not None:
                self.recorder.add("write", path, offset=offset, data=bytes(memoryview(data).cast("B")[:count]))
            return count

    def truncate(self, size: int | None = None) -> int:
        with self.recorder.one_call():
            size = super().truncate(size)
            path = self.recorder.below(self.fileno())
            if path is not None:
                self.recorder.add("truncate", path, offset=size)
            return size

    _append = False


REPLACED = ("open", "mkdir", "unlink", "remove", "rmdir", "truncate", "rename", "replace", "link")
REPLACED += ("pwrite", "write", "ftruncate", "fsync", "fdatasync")


class _Replacements:
    """Replacements of functions of `os`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._real = recorder, {name: getattr(os, name) for name in REPLACED}

    def by_name(self) -> dict[str, Callable[..., Any]]:
        on_descriptor = ("pwrite", "write", "ftruncate", "fsync", "fdatasync")
        return {
            "open": self._open,
            "mkdir": partial(self._on_path, "mkdir", "mkdir"),
            "unlink": partial(self._on_path, "unlink", "unlink"),
            "remove": partial(self._on_path, "remove", "unlink"),
            "rmdir": partial(self._on_path, "rmdir", "rmdir"),
            "truncate": partial(self._on_path, "truncate", "truncate"),
            "rename": partial(self._on_two, "rename", "rename"),
            "replace": partial(self._on_two, "replace", "rename"),
            "link": partial(self._on_two, "link", "link"),
        } | {name: partial(self._on_descriptor, name) for name in on_descriptor}

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        recorder = self._recorder
        relative = recorder.below(path, dir_fd) if flags & WRITES else None
        if relative is None:
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)
        with recorder.one_call():
            fresh = not os.path.lexists(f"{recorder.root}/{relative}")
            descriptor = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            _note_opened(recorder, relative, fresh, bool(flags & os.O_TRUNC))
            return descriptor

    def _on_path(
        self, name: str, kind: str, path: Any, *arguments: Any, dir_fd: int | None = None, **named: Any
    ) -> Any:
        relative = self._recorder.below(path, dir_fd)
        named |= {} if dir_fd is None else {"dir_fd": dir_fd}
        with self._recorder.one_call():
            result = self._real[name](path, *arguments, **named)
            if relative is not None:
                self._recorder.add(kind, relative, offset=arguments[0] if kind == "truncate" else 0)
            return result

    def _on_two(self, name: str, kind: str, source: Any, target: Any, **named: Any) -> None:
        one = self._recorder.below(source, named.get("src_dir_fd"))
        other = self._recorder.below(target, named.get("dst_dir_fd"))
        assert (one is None) == (other is None), f"{name} {source} to {target}: across the recorded folder's border"
        with self._recorder.one_call():
            self._real[name](source, target, **named)
            if one is not None and other is not None:
                self._recorder.add(kind, one, other)

    def _on_descriptor(self, name: str, descriptor: Any, *arguments: Any) -> Any:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        with self._recorder.one_call():
            size = os.fstat(number).st_size
            result = self._real[name](number, *arguments)
            if (path := self._recorder.below(number)) is not None:
                self._note(name, path, number, arguments, size, result)
            return result

    def _note(self, name: str, path: str, number: int, arguments: tuple, size: int, result: Any) -> None:
        """Record a call on a descriptor of a file that had `size` bytes before it."""
        if name == "pwrite":
            self._recorder.add("write", path, offset=arguments[1], data=bytes(arguments[0][:result]))
        elif name == "write":
            at_end = os.O_APPEND & _flags_of(number)
            offset = size if at_end else os.lseek(number, 0, os.SEEK_CUR) - result
            self._recorder.add("write", path, offset=offset, data=bytes(arguments[0][:result]))
        elif name == "ftruncate":
            self._recorder.add("truncate", path, offset=arguments[0])
        else:
            self._recorder.add("sync_dir" if stat.S_ISDIR(os.fstat(number).st_mode) else "sync", path)


def _flags_of(descriptor: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))


def _note_opened(recorder: Recorder, relative: str, fresh: bool, cut: bool) -> None:
    if fresh:
        recorder.add("create", relative)
    elif cut:
        recorder.add("truncate", relative, offset=0)


def _opener(recorder: Recorder) -> Callable[..., Any]:
    """Return the replacement of the built-in `open`."""
    real = io.open

    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        relative = recorder.below(file) if set(mode) & set("wxa+") else None
        if relative is None:
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        with recorder.one_call():
            fresh = not os.path.lexists(f"{recorder.root}/{relative}")
            raw = _RecordedRaw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            raw.recorder, raw._append = recorder, "a" in mode
            if not isinstance(file, int):  # a descriptor was noted when it was opened
                _note_opened(recorder, relative, fresh, "w" in mode)
        if "b" in mode and buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    return opened


def _swapper(recorder: Recorder) -> Callable[[str, str], int]:
    """Return the replacement of the function that exchanges two names."""
    real = files._swap

    def swap(path: str, other: str) -> int:
        one, two = recorder.below(path), recorder.below(other)
        assert (one is None) == (two is None), f"{path} and {other}: across the recorded folder's border"
        with recorder.one_call():
            code = real(path, other)
            if one is not None and two is not None and code == 0:
                recorder.add("exchange", one, two)
            return code

    return swap


_listening: list[Recorder] = []
_OF_TWO = {"os.rename", "os.link", "os.symlink"}
_EVENTS = {"open", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate"}


def _hook(event: str, arguments: tuple) -> None:
    if _listening and event in _EVENTS:
        for recorder in _listening:
            recorder.heard(event, arguments)


_hooked: list[bool] = []


@contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Record the changes below the existing folder `root` in all threads of this process."""
    if not _hooked:
        sys.addaudithook(_hook)  # permanent: Python cannot remove an audit hook
        _hooked.append(True)
    recorder = Recorder(root.resolve())
    kept = {name: getattr(os, name) for name in REPLACED}, io.open, files._swap
    for name, function in _Replacements(recorder).by_name().items():
        setattr(os, name, function)
    io.open = builtins.open = _opener(recorder)  # type: ignore[assignment]
    files._swap = _swapper(recorder)
    _listening.append(recorder)
    try:
        yield recorder
    finally:
        _listening.remove(recorder)
        for name, function in kept[0].items():
            setattr(os, name, function)
        io.open, files._swap = kept[1:]
        builtins.open = io.open
