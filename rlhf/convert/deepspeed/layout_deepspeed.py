"""Reads DeepSpeed's own checkpoints, ZeRO stages 0 to 3: float32 weights and moments from the ranks' flat partitions.

A folder has one folder per save, named by the save's tag, and a file `latest` that names one tag. A save has
`mp_rank_00_model_states.pt` (stages 0 to 2) or `zero_pp_rank_R_mp_rank_00_model_states.pt` (stage 3). At
stages 1 to 3 it also has `..._optim_states.pt` of each rank. Scripts in the folder never run. Weights are assembled as
in `zero_to_fp32` of DeepSpeed 0.19, except for two cases that `zero_to_fp32` gets wrong: frozen parameters in stage 1,
and stage 1 in bfloat16.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf.convert.deepspeed.deepspeed_files import MODEL_STATES, check_supported, find_save, open_first
from rlhf.convert.deepspeed.deepspeed_tensors import assemble
from rlhf.convert.huggingface.layout_trainer import progress_of
from rlhf.errors import UserError
from rlhf.models.hf.named_tensors import NamedTensors
from rlhf.models.hf.small_files import folder_with_config
from rlhf.models.hf.source import Contents, FunctionTensor, Origin, TensorInfo, TrainedSoFar
from rlhf.storage.disk_errors import DamagedCheckpoint

NAME = "deepspeed"


def recognises(origin: Origin) -> bool:
    """Return whether the folder, or a folder in it, is a save."""
    try:
        return find_save(origin) is not None
    except UserError:  # saves exist, but `find_save` cannot select one; `open_source` raises its error
        return True


def open_source(origin: Origin) -> NamedTensors:
    """Open a save. Raises UserError for an unknown tag, a missing file, and a save that `check_supported` rejects."""
    save = find_save(origin)
    if save is None:
        raise UserError(f"{origin.path} has no DeepSpeed save ({MODEL_STATES}). Give the folder of a save.")
    check_supported(save)
    states = open_first(save, MODEL_STATES)
    if not {"module", "buffer_names", "global_steps"} <= states.keys():
        raise DamagedCheckpoint(f"{save} has model states without DeepSpeed's entries, such as `module`")
    try:
        made = assemble(save, states)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{save} lacks DeepSpeed's structure: {error!r}. Set another --tag.") from None
    steps = {f"{name}.step": _in_memory(step) for name, step in made.steps.items()}
    # The Trainer of transformers writes the model's files beside the saves.
    files = origin.model_files or folder_with_config(origin.path, save.parent)
    contents = Contents({}, progress=_progress(states, save.parent), model_files=files, absent=made.absent)
    return NamedTensors(NAME, made.tensors, {**made.moments, **steps}, contents)


def _in_memory(step: Tensor) -> FunctionTensor:
    return FunctionTensor(TensorInfo((), step.dtype), lambda start, stop: step.reshape(-1)[start:stop].clone())


def _progress(states: Mapping[str, Any], beside: Path) -> TrainedSoFar:
    """Return steps and schedule. DeepSpeed's own schedules count from the first batch, as torch's do. If the engine has
    no schedule, transformers' Trainer may have saved its own schedule in the folder of the saves."""
    steps = int(states["global_steps"])
    schedule = states.get("lr_scheduler")
    if schedule and "last_batch_iteration" in schedule:
        schedule = {"last_epoch": schedule["last_batch_iteration"]}
    skipped = int(states.get("skipped_steps") or 0)
    return TrainedSoFar(step=steps, optimizer_steps=steps - skipped, schedule=schedule or progress_of(beside).schedule)
