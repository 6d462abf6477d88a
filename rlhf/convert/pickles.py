"""Reads pickle files of other tools without running code from them."""

import io
import os
import pickle
import pickletools
import re
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rlhf.convert.record_sum import COPY_AGAIN
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint

Allowed = Sequence[type | Callable[..., Any] | tuple[Any, str]]
"""Classes and functions that a pickle may use. A pair `(class, "module.name")` allows the class under this name."""

BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of a file that torch wrote before its files were zip archives."""
SCANNED = 1 << 20
"""Maximum number of bytes to search for the names in a rejected pickle, and bytes per read for a CRC-32."""
TENSOR_PREFIXES = ("torch.", "collections.")
"""Prefixes of the names that every pickle of tensors uses."""

_list_lock = threading.Lock()  # torch has one list of allowed classes per process


class StandIn:
    """Replaces an object that is not needed; stores the constructor arguments and the state from the pickle."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __new__(cls, *arguments: Any) -> "StandIn":
        made = super().__new__(cls)
        made.__init__(*arguments)  # type: ignore[misc]  # a pickle may skip __init__
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class TensorStandIn(torch.Tensor):
    """Replaces a Tensor subclass that has no data of its own, such as a DTensor. Any computation with it raises."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} of a {cls.__name__}, a stand-in without data")

    def __setstate__(self, state: Any) -> None:
        self.state = state


def stand_in(name: str, kind: type = StandIn) -> tuple[type, str]:
    """Return an entry of `Allowed` that unpickles the class `name` as a new subclass of `kind`."""
    return type(name.rpartition(".")[2], (kind,), {}), name


@contextmanager
def open_archive(path: Path, start: int = 0, size: int | None = None) -> Iterator[Any]:
    """Open a file of `torch.save`, or the `size` bytes from `start` on, and check the archive without unpickling.
    Raises DamagedCheckpoint for an incomplete archive, UserError for the format of torch before 1.6, another byte order
    or classes that are not allowed."""
    if not path.is_file():  # opening a pipe would block
        raise DamagedCheckpoint(f"{path} is {'not a regular file' if path.exists() else 'missing'}")
    with path.open("rb") as whole:
        part = _Part(whole, start, path.stat().st_size - start if size is None else size)
        part.records = _check_archive(path, part)
        part.seek(0)
        yield part


def _check_archive(path: Path, file: "_Part") -> dict[int, tuple[int, int]]:
    """Return the end and CRC-32 of each entry, by its offset. Verify the CRC-32 of all entries but tensors."""
    try:
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise DamagedCheckpoint(f"{path} has compressed entries, which torch.save does not write")
            if sum(entry.file_size for entry in archive.infolist()) > file.size:
                raise DamagedCheckpoint(f"{path} claims more bytes than it has")
            found = [(entry, _content_of(path, file, entry.header_offset)) for entry in archive.infolist()]
            for entry, start in found:
                file.seek(start)
                if entry.filename.endswith("/byteorder") and file.read(6) != b"little":  # torch would swap bytes
                    raise UserError(
                        f"{path} is from a machine with another byte order. Save it again on a little-endian machine."
                    )
                _compare_sum(path, file, entry, start)
            return {start: (start + entry.file_size, entry.CRC) for entry, start in found}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        file.seek(0)
        beginning = file.read(SCANNED)
        if beginning.startswith(BEFORE_1_6):
            raise UserError(
                f"{path} has the format of torch before 1.6. Load it with torch and save it again."
            ) from None
        if names := [name for name in _names_in(beginning) if not name.startswith(TENSOR_PREFIXES)]:
            raise _not_allowed(path, names) from None
        raise _damaged(path, _first_sentence(error)) from None


def _compare_sum(path: Path, file: "_Part", entry: zipfile.ZipInfo, start: int) -> None:
    if not entry.CRC or "/data/" in entry.filename:  # no CRC stored; a tensor's CRC is compared when the tensor is read
        return
    file.seek(start)
    found = 0
    for at in range(0, entry.file_size, SCANNED):
        found = zlib.crc32(file.read(min(SCANNED, entry.file_size - at)), found)
    if found != entry.CRC:
        raise _damaged(path, f"its entry {entry.filename} does not have the saved checksum")


def _damaged(path: Path, why: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is not an intact torch.save file: {why.rstrip('.')}. {COPY_AGAIN}")


def _content_of(path: Path, file: "_Part", header: int) -> int:
    """Return the offset of an entry's content. Its local header (30 bytes, a name, extra fields) begins at `header`."""
    file.seek(max(0, header))
    local = file.read(30)
    if header < 0 or not local.startswith(b"PK\3\4"):
        raise DamagedCheckpoint(f"{path} is not an intact torch.save file: its beginning is missing")
    return header + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")


@contextmanager
def restrict_unpickling(path: Path, allowed: Allowed) -> Iterator[None]:
    """Let `torch.load(..., weights_only=True)` of the file `path` create only the classes and functions `allowed`.

    Classes that other libraries have put on torch's list are not allowed either. Raises UserError that names a class
    that is not allowed, and DamagedCheckpoint for another kind of file.
    """
    try:
        with _allow_only(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # anything that torch cannot read raises later
            yield
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)|torch\.(?:distributed\.tensor|nested)", str(error)):
            raise _not_allowed(path, [found[1] or found[0]]) from None
        if "operand" in str(error) and (
            names := _names_in(_start_of_pickle(path))
        ):  # a protocol that torch does not read
            raise _not_allowed(path, names) from None
        raise _damaged(path, _cause(error)) from None
    except (DamagedCheckpoint, UserError):
        raise
    except Exception as error:  # the unpickler can raise anything for other kinds of files
        raise _damaged(path, _first_sentence(error)) from None


@contextmanager
def _allow_only(allowed: Allowed) -> Iterator[None]:
    with _list_lock:
        registered = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(allowed))
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(registered)


def _not_allowed(path: Path, names: Sequence[str]) -> UserError:
    return UserError(
        f"{path} uses {names[0]}, which is not allowed in a checkpoint: loading it could run any code. If you trust "
        "the file, save it again with tensors and plain containers only."
    )


def _start_of_pickle(path: Path) -> bytes:
    with suppress(Exception), zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
        with archive.open(name) as file:
            return file.read(SCANNED)
    return b""


def _names_in(content: bytes) -> list[str]:
    """Return the names that a pickle of any protocol uses, names outside torch and plain containers first."""
    names, texts = [], [""]
    with suppress(Exception):  # the bytes after the pickle, or all bytes, may not be a pickle
        for operation, argument, _ in pickletools.genops(content):
            if operation.name in ("GLOBAL", "INST"):
                names.append(str(argument).replace(" ", "."))
            elif operation.name == "STACK_GLOBAL":
                names.append(".".join(texts[-2:]))
            elif isinstance(argument, str):
                texts.append(argument)
    return sorted(names, key=lambda name: name.startswith(TENSOR_PREFIXES))


def _cause(error: Exception) -> str:
    """Return the unpickler's reason without the advice that torch puts around it."""
    text = re.sub(r"\033\[\d*m", "", str(error))
    lines = re.split(r"WeightsUnpickler error:|\n\n", text)[1:]
    return next((line.strip().split("\n")[0] for line in lines if line.strip()), _first_sentence(error))


def _first_sentence(error: Exception) -> str:
    return str(error).split("\n")[0].split(". ")[0] or type(error).__name__


class _Part(io.RawIOBase):
    """Presents a range of an open file as a file. `records` maps the offset of each archive entry to the
    entry's end and CRC-32."""

    records: Mapping[int, tuple[int, int]]

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self.size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if self._at < 0:
            raise ValueError("it is too short" if self.size else "it is empty")
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.size - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return count
