"""Builds training engines behind one interface (`base.py`). Checkpoints receive an engine's state, never the engine."""

import logging

import torch
from transformers import PreTrainedModel

from rlhf.backends.base import TrainingBackend
from rlhf.backends.deepspeed import DeepSpeedBackend, import_deepspeed
from rlhf.backends.fsdp2 import Fsdp2Backend
from rlhf.backends.training import Training
from rlhf.config import BackendConfig
from rlhf.errors import UserError
from rlhf.models.skeleton import float32_parameters, materialise
from rlhf.ranks import dims

log = logging.getLogger(__name__)


def check_backend(config: BackendConfig, device: torch.device) -> None:
    """Check that `config` works on `device`, before any model is loaded.

    Raises:
        UserError: DeepSpeed can't be imported, or a setting needs a GPU.
    """
    if config.use_liger and device.type == "cpu":
        raise UserError("backend.use_liger=true: Liger's kernels need a GPU, and this run has none. Set it to false.")
    if config.name != "deepspeed":
        return
    if config.offload_optimizer and device.type == "cpu":
        raise UserError(
            "backend.offload_optimizer=true: moves optimizer state from the GPU to the CPU, but this run has no GPU; "
            "set backend.offload_optimizer=false."
        )
    import_deepspeed(device)


def build_backend(
    model: PreTrainedModel, config: BackendConfig, device: torch.device, training: Training
) -> TrainingBackend:
    """Return `model` wrapped in the engine `config.name`. Collective.

    Parameters on the meta device become uninitialised shards. DeepSpeed below ZeRO stage 3 first allocates them
    unsharded on the CPU. The caller then loads the weights into the engine's shards and calls `after_load`.
    """
    if config.autocast == "bfloat16" and dims.everyone().rank == 0:
        _warn_about_float32_parameters(model)
    if config.name == "deepspeed" and config.zero_stage < 3:
        materialise(model, torch.device("cpu"))
    kind = DeepSpeedBackend if config.name == "deepspeed" else Fsdp2Backend
    return kind(model, config, device, training)


def _warn_about_float32_parameters(model: PreTrainedModel) -> None:
    if names := float32_parameters(model, torch.bfloat16):
        log.warning(
            "backend.autocast=bfloat16: forward and backward passes use bfloat16 for all weights, including %d that %s "
            "needs in float32, such as %s. The trained weights are float32. For passes in float32, set "
            "backend.autocast=none.",
            len(names),
            model.config.model_type,
            names[0],
        )
