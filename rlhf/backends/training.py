"""AdamW's settings and empty moments and the learning-rate schedule, shared by the backends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf.config import OptimConfig, TrainedFsdpConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of AdamW per weight, beside its step count."""


@dataclass(frozen=True)
class Training:
    """Settings of a model's training in its engine."""

    optim: OptimConfig
    grad_clip: float
    """Largest norm of the gradient over all ranks."""
    total_optimizer_steps: int
    updates_per_step: int = 1
    """Optimizer steps in a training step."""
    hf_files: Mapping[str, bytes] = field(default_factory=dict)
    """The small files of the model's Hugging Face folder, by name."""
    offload: TrainedFsdpConfig = field(default_factory=TrainedFsdpConfig)
    """What lies in the host's memory between the phases of the model."""


class Scheduled:
    """AdamW with a learning-rate schedule over optimizer or training steps, and the part of a train state (see
    `rlhf.storage.state.TrainState`) that is no tensor.

    Steps of both kinds are counted, so that a resume may change what the schedule goes by.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, training: Training) -> None:
        optim = training.optim
        self.optimizer, self._hf_files = optimizer, training.hf_files
        self._interval = optim.lr_scheduler_interval
        per_count = 1 if self._interval == "optimizer_step" else training.updates_per_step
        total = training.total_optimizer_steps // per_count
        self.scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(optim, step, total))
        self._taken = dict.fromkeys(("optimizer_step", "training_step"), 0)
        # Whether an optimizer step was taken since the last training step was counted.
        self._moved = False

    def end_update(self) -> None:
        """See `TrainingBackend.end_update`."""
        if self._moved:
            self._count("training_step")
        self._moved = False

    def step_taken(self) -> None:
        """Count an optimizer step that was taken."""
        self._moved = True
        self._count("optimizer_step")

    def _count(self, step: str) -> None:
        self._taken[step] += 1
        if step == self._interval:
            self.scheduler.step()

    def extra_state(self) -> dict[str, Any]:
        """See `TrainState.extra_state`."""
        state = {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"}
        # All groups have the same rate, and how many there are is nobody's concern.
        schedule = {k: v[:1] if k in ("base_lrs", "_last_lr") else v for k, v in state.items()}
        return {"lr_scheduler": schedule, "steps_taken": dict(self._taken)}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """See `TrainState.load_extra_state`. Of the saved schedule only the position counts: rates and shape are the
        present configuration's."""
        scheduler = self.scheduler
        rates = scheduler.base_lrs
        self._taken, self._moved = dict(state["steps_taken"]), False
        position = self._taken[self._interval]
        place = {"last_epoch": position, "_step_count": position + 1}
        scheduler.load_state_dict({**state["lr_scheduler"], **place, "base_lrs": rates, "lr_lambdas": [None]})
        factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
        scheduler._last_lr = [rate * factor for rate in rates]
        for group, lr in zip(self.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr

    def hf_files(self) -> Mapping[str, bytes]:
        """See `TrainState.hf_files`."""
        return self._hf_files


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """The trained parameters of `model`, with their names, as AdamW takes them: those without weight decay in a group
    of their own. No group is empty."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if optim.decay_norm_and_bias or not optim.weight_decay:
        return [{"params": named}]
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in named:
        # ZeRO 3 leaves a parameter without elements.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        groups[not is_decayed(name, tuple(shape))]["params"].append((name, parameter))
    return [group for group in groups if group["params"]]


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay acts on a parameter: one that is neither a norm's, nor a bias, nor another vector.

    Most norms and biases are vectors; norms of single heads and biases of single experts have a row for each.
    """
    owner, _, last = name.rpartition(".")
    return len(shape) > 1 and not last.endswith("bias") and "norm" not in owner.rpartition(".")[2].lower()


def adamw_options(optim: OptimConfig) -> dict[str, Any]:
    """Arguments of `torch.optim.AdamW` beside the parameters.

    Fused it takes one pass over the memory and no temporary tensors, on a GPU as on a CPU; its bits differ from those
    of the other ways, and depend neither on threads nor on where a weight lies in a flat tensor.
    """
    return {
        "lr": optim.lr,
        "betas": (optim.betas[0], optim.betas[1]),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "fused": True,
    }


def empty_moments(parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter before its first step.

    AdamW would make it at that step; a checkpoint must be readable into it before. Setting it leaves the step count
    alone, unlike a dummy step (pytorch issue 164929).
    """
    zeros = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}
    # Where the fused kernel of a GPU reads it.
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **zeros}


def learning_rate_factor(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The share of `optim.lr` at step `step` of the schedule (0 is the first) of `total_steps`: linear warm-up, then
    constant, linear or cosine decay."""
    if step < optim.lr_warmup_steps:
        return (step + 1) / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (step - optim.lr_warmup_steps) / max(1, total_steps - optim.lr_warmup_steps))
    shape = 1 - progress if optim.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape
