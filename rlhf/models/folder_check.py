"""Checks a model's folder by its small files and the headers of its weights, before the model loads."""

import json
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.models.config_check import check_sizes
from rlhf.models.parameter_count import tensor_shapes

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenization_*.py")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL_OBJECTS = ("config.json", "generation_config.json")
TOKENIZER_OBJECTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
)
"""JSON files from which transformers loads a tokenizer; the content of each is an object."""
READ_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")
"""Suffixes of the files that the ranks read."""
LFS_POINTER = b"version https://git-lfs"
IS_POINTER = "is a pointer of Git LFS, not the file itself. Fetch it: `git lfs pull` in its repository."


def check_folder(setting: str, name: str, *, tokenizer: bool = True, weights: bool = True) -> None:
    """Check the files of the model folder `name`; accept every Hub name.

    Raises:
        UserError: a small file is damaged; with `weights`, a safetensors file is missing or damaged; with `tokenizer`,
            the tokenizer is missing or its JSON files are damaged.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    prefix = f"{setting}={name}"
    check_small_files(prefix, folder, tokenizer=tokenizer)
    named = (indexed_weights(prefix, folder) or []) if weights else []
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
    if (config := _json_object(prefix, folder / "config.json")) is not None:
        check_sizes(prefix, config, tensor_shapes(folder))


def check_small_files(prefix: str, folder: Path, *, tokenizer: bool) -> None:
    """Check the file types in `folder`, and the content of its small files.

    All files must be regular, no small file may be a pointer of Git LFS, and transformers' JSON files must contain
    objects.

    Args:
        tokenizer: also check the tokenizer's JSON files.

    Raises:
        UserError: a file fails a check. Missing files are accepted.
    """
    objects = (*MODEL_OBJECTS, *TOKENIZER_OBJECTS) if tokenizer else MODEL_OBJECTS
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in READ_SUFFIXES)
    except OSError as error:
        raise UserError(f"{prefix}: the folder cannot be read ({error.strerror}). Correct its permissions.") from error
    for path in found:
        if problem := _file_problem(path, may_be_folder=path.name not in objects):
            raise UserError(f"{prefix}: {path.name} {problem}")
    for name in objects:
        content = _json_object(prefix, folder / name)
        if name == "tokenizer.json" and content is not None and not isinstance(content.get("model"), dict):
            raise UserError(f'{prefix}: {name} is not a tokenizer: it has no object "model". Copy or fetch it again.')


def _file_problem(path: Path, *, may_be_folder: bool) -> str | None:
    try:
        mode = path.stat().st_mode  # a pipe must not be opened: the read would never end
        if stat.S_ISDIR(mode) and may_be_folder:
            return None
        if not stat.S_ISREG(mode):
            return "is not a regular file. Replace it by the model's file."
        if path.suffix == ".safetensors":
            return None  # `safetensors_problem` checks the files that are loaded
        with path.open("rb") as file:
            return IS_POINTER if file.read(len(LFS_POINTER)) == LFS_POINTER else None
    except OSError as error:
        return f"cannot be read ({error.strerror}). Copy or fetch it again, or correct its permissions."


def _json_object(prefix: str, path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None for a missing file. Raise UserError for other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{prefix}: {path.name} is not JSON: {error}. Copy or fetch it again.") from error
    except OSError:
        return None  # missing, or removed since `_file_problem`
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise UserError(f"{prefix}: {path.name} must be a JSON object, but has a {kind}. Copy or fetch it again.")
    return content


def indexed_weights(prefix: str, folder: Path) -> list[str] | None:
    """Return the weights files that the index lists; None without an index.

    Like transformers, ignore the index if the folder also has a model.safetensors.

    Raises:
        UserError: the file is not an index, or lists a file outside the folder.
    """
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return None
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{prefix}: {INDEX} is not an index of weights ({reason}). Copy or fetch it again.") from error
    for name in names:
        # Another path would open files outside the folder.
        if not isinstance(name, str) or name in ("", "..") or "\0" in name or Path(name).name != name:
            raise UserError(
                f"{prefix}: {INDEX} lists {name!r}, which is not the name of a file in the folder. Copy or fetch the "
                "index again, or move the weights into the folder."
            )
    return sorted(names)


def _missing(folder: Path, named: list[str]) -> Iterator[str]:
    """Yield a description of the missing weights: files `named` in the index, or without an index any safetensors."""
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
            return IS_POINTER
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length < size else b""
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(text).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "does not begin with a safetensors header: it is damaged or another kind of file. Fetch it again."
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"has {size:,} bytes of {whole:,}: it is damaged. Copy or fetch it again."
