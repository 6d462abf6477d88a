"""Check of a model's folder by the names in it and the headers of its weights, before anything could load it."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from rlhf.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenization_*.py")
INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"


def check_folder(setting: str, name: str, *, tokenizer: bool = True, weights: bool = True) -> None:
    """Raise UserError when the folder lacks `weights` in safetensors, parts of them, or a `tokenizer`, if needed,
    and when config.json or a file of weights is torn.

    A Hub name passes.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    said = f"{setting}={name}"
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{said}: config.json is not JSON: {error}. Copy or fetch it again.") from error
    except OSError:
        pass  # told where it is read
    missing = list(_missing(folder)) if weights else []
    if missing and (pickles := sorted(folder.glob("pytorch_model*.bin"))):
        names = f"{shlex.quote(name)} {shlex.quote(name.rstrip('/') + '-safetensors')}"
        raise UserError(
            f"{said}: its weights are pickles ({pickles[0].name}), which can run code and are not read. Make a folder "
            f"with safetensors from it: `python -m rlhf.checkpoint convert {names} --to hf`."
        )
    if tokenizer and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        missing.append("tokenizer (tokenizer.json)")
    if missing:
        raise UserError(f"{said}: the folder has no {' and no '.join(missing)}. Complete it, or name another.")
    for path in _weight_files(folder) if weights else ():
        if problem := _torn(path):
            raise UserError(f"{said}: {path.name} {problem}")


def _missing(folder: Path) -> Iterator[str]:
    """Weights that are not there: all, or files that the index names."""
    if (folder / INDEX).is_file():
        try:
            named = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # told when it is read
        lost = sorted(file for file in named if not (folder / str(file)).is_file())
        yield from [f"{lost[0]}, which its index names ({len(lost)} of {len(named)} such files)"] if lost else []
    elif not any(folder.glob("*.safetensors")):
        yield "weights (*.safetensors)"


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: those of the index, or the only one."""
    single = folder / "model.safetensors"
    if single.is_file() or not (folder / INDEX).is_file():
        return [single] if single.is_file() else []
    try:
        return [folder / name for name in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # told when it is read


def _torn(path: Path) -> str | None:
    """What is wrong with a file in safetensors by its header and its size: 8 bytes of the header's length, the header
    in JSON, and tensors up to the largest of its offsets."""
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
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "begins with no header in safetensors: it is damaged or something else. Fetch it again."
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"has {size:,} bytes of {whole:,}: it is damaged. Copy or fetch it again."
