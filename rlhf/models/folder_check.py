"""Checks a model's folder by its file names and the headers of its weights, before the model loads."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from rlhf.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenization_*.py")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"


def check_folder(setting: str, name: str, *, tokenizer: bool = True, weights: bool = True) -> None:
    """Check the files of the model folder `name`; accept every Hub name.

    Raises:
        UserError: config.json is damaged; with `weights`, a safetensors file is missing or damaged; with `tokenizer`,
            the tokenizer is missing.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    prefix = f"{setting}={name}"
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{prefix}: config.json is not JSON: {error}. Copy or fetch it again.") from error
    except OSError:
        pass  # reported by the code that reads config.json
    named = _indexed(prefix, folder) if weights else []
    missing = list(_missing(folder, named)) if weights else []
    if missing and (pickles := sorted(folder.glob("pytorch_model*.bin"))):
        names = f"{shlex.quote(name)} {shlex.quote(name.rstrip('/') + '-safetensors')}"
        raise UserError(
            f"{prefix}: its weights are pickles ({pickles[0].name}), which can run code and are not loaded. Convert "
            f"the folder to safetensors: `python -m rlhf.checkpoint convert {names} --to hf`."
        )
    if tokenizer and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        missing.append("tokenizer (tokenizer.json)")
    if missing:
        raise UserError(
            f"{prefix}: the folder has no {' and no '.join(missing)}. Add the files, or set another folder."
        )
    for file in (named or [SINGLE] * (folder / SINGLE).is_file()) if weights else ():
        if problem := safetensors_problem(folder / file):
            raise UserError(f"{prefix}: {file} {problem}")


def _indexed(prefix: str, folder: Path) -> list[str]:
    """Return the weights files that the index lists. Like transformers, ignore the index beside model.safetensors."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return []
    try:
        return sorted(set(map(str, json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{prefix}: {INDEX} is not an index of weights ({reason}). Copy or fetch it again.") from error


def _missing(folder: Path, named: list[str]) -> Iterator[str]:
    """Yield descriptions of missing weights: all weights, or the files `named` in the index."""
    if missing := [file for file in named if not (folder / file).is_file()]:
        yield f"{missing[0]}, which its index lists ({len(missing)} of {len(named)} listed files are missing)"
    elif not named and not any(folder.glob("*.safetensors")):
        yield "weights (*.safetensors)"


def safetensors_problem(path: Path) -> str | None:
    """Return the problem of a safetensors file, and the remedy; None for an intact file.

    Only the header and the size are checked. A file is 8 bytes with the header's length, the JSON header, and tensors
    up to the last offset.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            return "is a pointer of Git LFS, not the file itself. Fetch it: `git lfs pull` in its repository."
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length < size else b""
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(text).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "does not begin with a safetensors header: it is damaged or another kind of file. Fetch it again."
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"has {size:,} bytes of {whole:,}: it is damaged. Copy or fetch it again."
