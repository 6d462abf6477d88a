"""Pickle files of other tools, read without running what they say."""

import pickle
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint


def read_pickle(path: Path, allowed: Sequence[type | Callable[..., Any] | tuple[Any, str]] = ()) -> Any:
    """The content of a file of `torch.save`, its tensors mapped into memory and not read yet.

    Besides tensors and plain containers only the classes and functions `allowed` are made; one that lives elsewhere in
    other releases comes as a pair with its name, `(class, "module.name")`. Raises UserError that names whatever else
    the file asks for, DamagedCheckpoint for a file that is cut off or no such pickle.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if names := re.findall(r"GLOBAL ([A-Za-z_][\w.]+)|Unsupported (?:global|class) ([A-Za-z_][\w.]+)", str(error)):
            name = next(filter(None, names[0]))
            raise UserError(
                f"{path} asks for {name}, which is not on the list of what a checkpoint may hold: such a file could "
                "run anything. If you trust it, save it anew with tensors and plain containers only."
            ) from None
        raise DamagedCheckpoint(f"{path} is no file of torch.save, or is cut off: {error}") from None
    except Exception as error:  # a file that is no pickle makes the reader fail in any way
        raise DamagedCheckpoint(f"{path} is no whole file of torch.save: {str(error).split('. ')[0]}") from None
