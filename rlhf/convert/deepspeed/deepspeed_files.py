"""Finds and loads the files of one DeepSpeed save, with a list of the classes that their pickles may use."""

import codecs
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from rlhf.convert.pickles import Allowed, stand_in
from rlhf.convert.stored_tensor import open_mapping
from rlhf.errors import UserError, did_you_mean, nearest
from rlhf.models.hf.source import Origin

LATEST = "latest"
MODEL_STATES, OPTIM_STATES = "*_model_states.pt", "*_optim_states.pt"
RANK = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(?:model|optim)_states\.pt")


# A save uses a few of DeepSpeed's classes. An application may add the random state of numpy, and its own command-line
# arguments. Stand-ins replace all these classes. No numpy object may be created, because a pickle sets an object's
# state, and numpy would use bytes of a forged state as memory addresses.
ALLOWED: Allowed = [
    *(
        stand_in(name)
        for name in (
            "deepspeed.runtime.zero.config.ZeroStageEnum",
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.utils.tensor_fragment.fragment_address",
            "argparse.Namespace",
            "numpy.ndarray",
            "numpy.dtype",
            *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        )
    ),
    codecs.encode,
    defaultdict,
]


def find_save(origin: Origin) -> Path | None:
    """Return the folder of the save: `origin` itself, the folder of `--tag`, or the one that the file `latest` names.
    Return None if there is no save. Raises UserError if the selected save is missing, or neither `--tag` nor `latest`
    selects a save."""
    if origin.tag is None and _is_save(origin.path):
        return origin.path
    tags = sorted(path.name for path in origin.path.iterdir() if path.is_dir() and _is_save(path))
    if not tags:
        return None
    tag = origin.tag
    if tag is None and (latest := origin.path / LATEST).is_file():
        tag = latest.read_text(errors="replace").strip()
    if tag in tags:
        return origin.path / tag
    saves = f"There are {', '.join(tags)}."
    if origin.tag is not None:
        raise UserError(f"--tag={tag} is not in {origin.path}. {saves}{did_you_mean(nearest(tag or '', tags))}")
    if tag is None:
        raise UserError(f"{origin.path} has no file `{LATEST}` that selects a save. Set --tag. {saves}")
    raise UserError(f"{origin.path / LATEST} names {tag!r}, which is missing or has no file. Set --tag. {saves}")


def _is_save(folder: Path) -> bool:
    return any(RANK.fullmatch(path.name) for path in folder.glob(MODEL_STATES))


def check_supported(save: Path) -> None:
    """Raise UserError for a save split over pipeline stages, tensor parallel ranks or experts, or offloaded to NVMe."""
    found = {
        "layer_*model_states.pt": "a model split over pipeline stages or experts",
        "expp_rank_*": "a mixture of experts split over ranks",
        "offloaded_tensors": "an optimizer whose state is on NVMe",
    }
    for pattern, what in found.items():
        if path := next(iter(sorted(save.glob(pattern))), None):
            raise UserError(f"{save} has {what} ({path.name}), which is not supported. Save without it.")
    for path in sorted(save.glob("*_states.pt")):
        if (match := RANK.fullmatch(path.name)) and int(match[2]):
            raise UserError(
                f"{save} has a model split over tensor parallel ranks ({path.name}), which is not supported. Save it "
                "without that split."
            )


def files_by_rank(save: Path, pattern: str) -> dict[int, Path]:
    """Return the files that match `pattern`, by rank; a file without a rank in its name is rank 0's.

    Raises UserError if two files have the same rank.
    """
    found: dict[int, Path] = {}
    for path in sorted(save.glob(pattern)):
        if match := RANK.fullmatch(path.name):
            rank = int(match[1] or 0)
            if rank in found:
                raise UserError(f"{save} has {found[rank].name} and {path.name} of two saves. Remove the older one.")
            found[rank] = path
    return found


def check_no_others(save: Path, pattern: str, ranks: int) -> None:
    """Raise UserError, which names the file, if a file of another save matches `pattern`.

    Such a file has rank `ranks` or higher. If rank 0's file has no rank in its name, the save has no other file.
    """
    files = files_by_rank(save, pattern)
    if (alone := RANK.fullmatch(files[0].name) if 0 in files else None) and alone[1] is None:
        ranks = min(ranks, 1)
    for rank, path in files.items():
        if rank >= ranks:
            raise UserError(f"{save} has {ranks} files {pattern}, and {path.name} is from another save. Remove it.")


def open_all(save: Path, pattern: str, world_size: int) -> list[dict[str, Any]]:
    """Load the files that match `pattern`, in the order of the ranks.

    Raises UserError for missing files, or for a file of another save; the message names the files.
    """
    files = files_by_rank(save, pattern)
    if missing := [rank for rank in range(world_size) if rank not in files]:
        like = next(iter(files.values())).name if files else f"zero_pp_rank_0_mp_rank_00{pattern[1:]}"
        names = ", ".join(re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", like) for rank in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise UserError(f"{save} was saved by {world_size} ranks and lacks {names}{more}. Copy the missing files.")
    check_no_others(save, pattern, world_size)
    return [open_mapping(files[rank], ALLOWED, "DeepSpeed") for rank in range(world_size)]


def open_first(save: Path, pattern: str) -> dict[str, Any]:
    """Load the file of rank 0 that matches `pattern`. Raises UserError when the file is missing."""
    files = files_by_rank(save, pattern)
    if 0 not in files:
        other = f", but {next(iter(files.values())).name}" if files else ""
        raise UserError(f"{save} has no file {pattern} of rank 0{other}. Copy the missing files.")
    return open_mapping(files[0], ALLOWED, "DeepSpeed")
