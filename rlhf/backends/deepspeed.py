"""Trains with DeepSpeed: ZeRO stages 0 to 3, on CPU (gloo) and CUDA (NCCL), with any number of ranks."""

import contextlib
import importlib
import io
import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.backends.base import TrainingBackend
from rlhf.backends.gather import gather_tensors
from rlhf.backends.training import Scheduled, Training, adamw_options, parameter_groups
from rlhf.backends.zero import ZeroState, partition
from rlhf.config import BackendConfig
from rlhf.config.buffer_sizes import REDUCE_BUCKET
from rlhf.errors import UserError
from rlhf.models.adapter_layers import Adapters
from rlhf.models.fused_experts import FileConversions
from rlhf.models.log_prob_head import with_log_probs
from rlhf.models.skeleton import persistent_buffers
from rlhf.ranks import dims
from rlhf.storage.shards import Shard, Shards

LARGEST_PERSISTENT = 100_000
"""Largest number of elements of a weight that ZeRO 3 keeps gathered between uses."""


class DeepSpeedBackend(Scheduled, TrainingBackend):
    """Trains a model with float32 master weights, AdamW in float32 and a learning-rate schedule.

    With `autocast=bfloat16` the module is bfloat16, and gradients are summed over micro-batches and ranks in float32.
    Exceptions: stage 0, and stages 1 and 2 with `offload_optimizer`, sum a rank's micro-batches in bfloat16.
    """

    def __init__(self, model: PreTrainedModel, config: BackendConfig, device: torch.device, training: Training) -> None:
        optim, grad_clip = training.optim, training.grad_clip
        self._conversions = FileConversions.of(model)
        deepspeed = import_deepspeed(device)
        dtype = torch.bfloat16 if config.autocast == "bfloat16" else torch.float32
        float32_weights: dict[str, Tensor] = {}
        # Keep the float32 weights: DeepSpeed would compute the master weights from weights already cast to bfloat16.
        if dtype == torch.bfloat16:
            float32_weights = {
                name: p.data for name, p in model.named_parameters() if p.requires_grad and not p.is_meta
            }
        settings = _settings(config, grad_clip, [(p.numel(), p.requires_grad) for p in model.parameters()])
        if config.zero_stage == 3:
            partition(model, deepspeed.zero.Init(nn.Module(), config_dict_or_path=settings, dtype=dtype), device, dtype)
        groups = parameter_groups(model, optim)
        options = adamw_options(optim)
        stage_0 = config.zero_stage == 0
        optimizer = ClippedAdamW(groups, grad_clip, **options) if stage_0 else torch.optim.AdamW(groups, **options)
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the memory in use
            self._engine, *_ = deepspeed.initialize(
                model=with_log_probs(model, use_liger=config.use_liger).train(), optimizer=optimizer, config=settings
            )
        self.module: nn.Module = self._engine
        super().__init__(optimizer, training)
        # The module's dtype if every rank has the module's weights unsharded; None at stage 3.
        self._unsharded_dtype = dtype if config.zero_stage < 3 else None
        self._adapters = Adapters.of(self._engine.module)
        self._shard_group, self._device = dims.model(device), self._engine.device
        self._state = ZeroState(self._engine, optimizer, training.offload)
        if float32_weights:
            for name, shard in self._state.weights():
                if name in float32_weights:
                    shard.local.copy_(shard.cut(float32_weights[name]))
            self._state.refresh()
        self._state.move_to_host()

    def on_device(self) -> AbstractContextManager[None]:
        return self._state.for_passes()

    def backward(self, loss: Tensor) -> None:
        """Scale the loss by the number of ranks: DeepSpeed averages over ranks, but the interface requires a sum."""
        self._engine.backward(loss * dims.data().size)

    def optimizer_step(self) -> dict[str, float]:
        lr = self.scheduler.get_last_lr()[0]
        clipped = self.optimizer if isinstance(self.optimizer, ClippedAdamW) else None
        if clipped is not None:
            clipped.grad_norm = math.inf
        with self._state.for_step():
            self._engine.step()
        norm = float(self._engine.get_global_grad_norm() if clipped is None else clipped.grad_norm)
        if math.isfinite(norm):
            self.count_optimizer_step()
            self._state.read_step_counts()
        return {"grad_norm": norm, "lr": float(lr)}

    def zero_grad(self) -> None:
        self._state.clear_gradients()

    def model_shards(self) -> Shards:
        """Return views of the float32 master weights."""
        if self._adapters is not None:
            return dict(self._adapters.trained(self._state.weights()))
        return dict(self._state.weights()) | self._buffer_shards()

    def base_shards(self) -> Shards:
        """Return views of the frozen base weights in the module, which have no master weights."""
        if self._adapters is None:
            return {}
        return dict(self._adapters.base([*self._state.frozen(), *self._buffer_shards().items()]))

    def optimizer_shards(self) -> Shards:
        moments = self._state.moments()
        return dict(moments if self._adapters is None else self._adapters.trained(moments))

    def after_load(self) -> None:
        """Recompute the module's weights from the master weights."""
        with self._state.for_weights():
            self._state.refresh()

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight and buffer, without a gather if the module's own weights have the right type."""
        if self._adapters is not None:
            yield from self.merged_tensors(self._adapters, dtype)
            return
        dtype, device = dtype or torch.float32, self._device
        if self._unsharded_dtype in (torch.float32, dtype):
            yield from ((name, weight.to(device).to(dtype)) for name, weight in self._state.module_weights())
        else:
            yield from gather_tensors(self._state.weights(), self._shard_group, dtype=dtype, device=device)
        yield from ((name, buffer.detach()) for name, buffer in persistent_buffers(self._engine.module))

    def _buffer_shards(self) -> dict[str, Shard]:
        saved_here, buffers = dims.everyone().rank == 0, persistent_buffers(self._engine.module)
        return {name: Shard(tuple(buffer.shape), (0,), buffer.detach(), saved_here) for name, buffer in buffers}


class ClippedAdamW(torch.optim.AdamW):
    """AdamW for stage 0. Clips before a step and skips the step if the norm is not finite, as other stages do."""

    def __init__(self, groups: list[dict[str, Any]], grad_clip: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self._grad_clip = grad_clip
        self.grad_norm: float | Tensor = math.inf
        """Norm of the last step's gradient before clipping."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.grad_norm = nn.utils.clip_grad_norm_(parameters, self._grad_clip)
        if torch.isfinite(self.grad_norm):
            super().step(closure)


def _set_device_variables(device: torch.device) -> None:
    os.environ["DS_ACCELERATOR"] = device.type  # DeepSpeed reads this variable once, at the import
    if device.type == "cuda":
        # DeepSpeed uses LOCAL_RANK as the GPU's index. If a rank sees only its own GPU, index and local rank differ.
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    os.environ.setdefault("LOCAL_RANK", "0")


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed and prepare it for an engine on `device`.

    Raises:
        UserError: DeepSpeed is not installed or can't be imported.
    """
    _set_device_variables(device)
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
        groups: Any = importlib.import_module("deepspeed.utils.groups")
    except Exception as error:
        raise UserError(
            f"backend.name=deepspeed: DeepSpeed can't be imported ({type(error).__name__}: {error}). Install it with "
            "`pip install 'rlhf[deepspeed]'`, or set backend=fsdp2."
        ) from error
    logging.getLogger("DeepSpeed").addFilter(_is_useful)
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)
    # On a CPU, DeepSpeed would compile an op that only inference uses. That needs ninja, a C++ compiler and half a
    # minute.
    deepspeed.ops.__compatible_ops__ = {}
    # Give DeepSpeed our process group. Its own group would not have the timeout trainer.collective_timeout_s.
    groups._WORLD_GROUP = dims.everyone().group
    return deepspeed


def _is_useful(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()  # logged at each start, for torch's AdamW


def _settings(config: BackendConfig, grad_clip: float, sizes: list[tuple[int, bool]]) -> dict[str, Any]:
    """Return DeepSpeed's configuration. `sizes` has each weight's number of elements and whether it is trained."""
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "reduce_bucket_size": min(REDUCE_BUCKET, sum(numel for numel, trained in sizes if trained)),
        "stage3_param_persistence_threshold": min(LARGEST_PERSISTENT, sum(numel for numel, _ in sizes) // 100),
    }
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # required by DeepSpeed, which uses it only in reports
        "gradient_accumulation_steps": 1,
        # `optimizer_step` decides when to step, after any number of backward passes.
        "managed_gradient_accumulation": False,
        "gradient_clipping": grad_clip if config.zero_stage else 0.0,
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},
    }
    if config.autocast == "bfloat16":
        settings["bf16"] = {"enabled": True}
        if config.zero_stage:  # stage 0 supports only the dtype of the weights
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
