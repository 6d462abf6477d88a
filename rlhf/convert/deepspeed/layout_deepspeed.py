"""Reads DeepSpeed's own checkpoints, ZeRO stages 0 to 3: float32 weights and moments from the ranks' flat partitions.

A folder has one folder per save, its tag, and a file `latest` that names one tag. A save has
`mp_rank_00_model_states.pt` (stages 0 to 2) or `zero_pp_rank_R_mp_rank_00_model_states.pt` (stage 3), and
`..._optim_states.pt` of each rank. Scripts in the folder never run. Weights are assembled as in `zero_to_fp32` of
DeepSpeed 0.19, except for two cases that `zero_to_fp32` gets wrong: frozen parameters in stage 1, and stage 1 in
bfloat16.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf.convert.deepspeed.deepspeed_files import MODEL_STATES, check_supported, find_save, open_first
from rlhf.convert.deepspeed.deepspeed_tensors import assemble
from rlhf.convert.huggingface.layout_trainer import progress_of
from rlhf.convert.stored_tensor import read_pieces
from rlhf.errors import UserError
from rlhf.models.hf.source import Contents, Origin, TensorInfo, TrainedSoFar, cut
from rlhf.storage.disk_errors import DamagedCheckpoint

NAME = "deepspeed"


def recognises(origin: Origin) -> bool:
    """Return whether the folder, or a folder in it, is a save."""
    try:
        return find_save(origin) is not None
    except UserError:  # saves exist; `open_source` raises the reason
        return True


def open_source(origin: Origin) -> "DeepSpeedSource":
    """Open a save. Raises UserError for an unknown tag, a rank's missing file, and a split other than ZeRO's."""
    save = find_save(origin)
    if save is None:
        raise UserError(f"{origin.path} has no DeepSpeed save: no folder in it has files {MODEL_STATES}.")
    check_supported(save)
    return DeepSpeedSource(save, _model_files(origin, save))


def _model_files(origin: Origin, save: Path) -> Path | None:
    """Return the user's folder, or the one that the Trainer of transformers writes beside the saves."""
    beside = [folder for folder in (origin.path, save.parent) if (folder / "config.json").is_file()]
    return origin.model_files or next(iter(beside), None)


class DeepSpeedSource:
    """A `TensorSource` of one save; reads ranges of the ranks' files."""

    layout = NAME

    def __init__(self, save: Path, model_files: Path | None) -> None:
        states = open_first(save, MODEL_STATES)
        if not {"module", "buffer_names", "global_steps"} <= states.keys():
            raise DamagedCheckpoint(f"{save} has model states without DeepSpeed's entries, such as `module`")
        try:
            made = assemble(save, states)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{save} lacks DeepSpeed's structure: {error!r}. Set another --tag.") from None
        self._steps = made.steps
        self._pieces = {name: pieces for name, (_, pieces) in (made.tensors | made.moments).items()}
        steps = {f"{name}.step": TensorInfo((), step.dtype) for name, step in made.steps.items()}
        self.contents = Contents(
            tensors={name: info for name, (info, _) in made.tensors.items()},
            moments={name: info for name, (info, _) in made.moments.items()} | steps,
            progress=_progress(states, save.parent),
            model_files=model_files,
            absent=made.absent,
        )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name.endswith(".step") and (step := self._steps.get(name.removesuffix(".step"))) is not None:
            return step.reshape(-1)[start:stop].clone()
        info = self.contents.tensors.get(name) or self.contents.moments[name]
        return read_pieces(cut(self._pieces[name], start, stop), info.dtype)

    def close(self) -> None:
        """See `TensorSource.close`; files are open only during a read."""


def _progress(states: Mapping[str, Any], beside: Path) -> TrainedSoFar:
    """Return steps and schedule. DeepSpeed's own schedules count from the first batch, as torch's do. The Trainer of
    transformers saves a schedule that the engine lacks beside the saves."""
    steps = int(states["global_steps"])
    schedule = states.get("lr_scheduler")
    if schedule and "last_batch_iteration" in schedule:
        schedule = {"last_epoch": schedule["last_batch_iteration"]}
    skipped = int(states.get("skipped_steps") or 0)
    return TrainedSoFar(step=steps, optimizer_steps=steps - skipped, schedule=schedule or progress_of(beside).schedule)
