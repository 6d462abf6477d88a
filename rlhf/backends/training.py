"""Sets up AdamW, its parameter groups and the learning-rate schedule for all backends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf.config import OptimConfig, TrainedFsdpConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per weight besides the step count."""


@dataclass(frozen=True)
class Training:
    """Settings with which an engine trains a model."""

    optim: OptimConfig
    grad_clip: float
    """Maximum gradient norm over all ranks, for clipping."""
    total_optimizer_steps: int
    updates_per_step: int = 1
    """Optimizer steps in a training step."""
    hf_files: Mapping[str, bytes] = field(default_factory=dict)
    """The small files of the model's Hugging Face folder, by name."""
    offload: TrainedFsdpConfig = field(default_factory=TrainedFsdpConfig)
    """Which tensors are in host memory while the model is idle."""


class Scheduled:
    """Advances the learning-rate schedule per optimizer step or per training step, and saves its state.

    Counts both kinds of steps, so that a resume may change `lr_scheduler_interval`. Implements a part of
    `TrainingBackend`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, training: Training) -> None:
        optim = training.optim
        self.optimizer, self._hf_files = optimizer, training.hf_files
        self._interval = optim.lr_scheduler_interval
        per_count = 1 if self._interval == "optimizer_step" else training.updates_per_step
        total = training.total_optimizer_steps // per_count
        self.scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(optim, step, total))
        self._steps = dict.fromkeys(("optimizer_step", "training_step"), 0)
        # Whether an optimizer step was taken since the last counted training step.
        self._moved = False

    def end_update(self) -> None:
        if self._moved:
            self._count("training_step")
        self._moved = False

    def count_optimizer_step(self) -> None:
        self._moved = True
        self._count("optimizer_step")

    def _count(self, step: str) -> None:
        self._steps[step] += 1
        if step == self._interval:
            self.scheduler.step()

    def extra_state(self) -> dict[str, Any]:
        state = {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"}
        # Save one rate, because all groups have the same rate, and a resume may change the number of groups.
        schedule = {k: v[:1] if k in ("base_lrs", "_last_lr") else v for k, v in state.items()}
        return {"lr_scheduler": schedule, "steps_taken": dict(self._steps)}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Load only the schedule's position; the settings define rates and shape."""
        scheduler = self.scheduler
        rates = scheduler.base_lrs
        steps = {name: int(taken) for name, taken in state["steps_taken"].items()}
        count = steps[self._interval]
        position = {"last_epoch": count, "_step_count": count + 1}
        scheduler.load_state_dict({**state["lr_scheduler"], **position, "base_lrs": rates, "lr_lambdas": [None]})
        self._steps, self._moved = steps, False
        factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
        scheduler._last_lr = [rate * factor for rate in rates]
        for group, lr in zip(self.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr

    def hf_files(self) -> Mapping[str, bytes]:
        return self._hf_files


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Return the named trained parameters of `model` as AdamW's groups, with and without weight decay.

    An empty group is left out.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if optim.decay_norm_and_bias or not optim.weight_decay:
        return [{"params": named}]
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in named:
        # ZeRO 3 gives the parameter itself the shape [0].
        shape = getattr(parameter, "ds_shape", parameter.shape)
        groups[not is_decayed(name, tuple(shape))]["params"].append((name, parameter))
    return [group for group in groups if group["params"]]


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether weight decay acts on a parameter: not on norms, biases and other vectors.

    Most norms and biases are vectors. Norms per head and biases per expert are matrices, recognised by their names.
    """
    owner, _, last = name.rpartition(".")
    return len(shape) > 1 and not last.endswith("bias") and "norm" not in owner.rpartition(".")[2].lower()


def adamw_options(optim: OptimConfig) -> dict[str, Any]:
    """Return the arguments of `torch.optim.AdamW` besides the parameters.

    The fused kernel makes one pass over memory without temporary tensors, on GPU and CPU. Its bits differ from those of
    other implementations, but do not depend on the number of threads or a weight's position in a flat tensor.
    """
    return {
        "lr": optim.lr,
        "betas": (optim.betas[0], optim.betas[1]),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "fused": True,
    }


def empty_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter before its first step.

    AdamW would allocate the state at that step, but a checkpoint is loaded into the state earlier. A dummy step would
    change the step count (pytorch issue 164929).
    """
    zeros = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}
    # On a GPU the fused kernel reads the count from the device.
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **zeros}


def learning_rate_factor(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the factor of `optim.lr` at `step` (from 0) of `total_steps`: linear warm-up, then the chosen decay."""
    if step < optim.lr_warmup_steps:
        return (step + 1) / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (step - optim.lr_warmup_steps) / max(1, total_steps - optim.lr_warmup_steps))
    shape = 1 - progress if optim.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape
