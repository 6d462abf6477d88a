"""Optimizer settings of actor and critic: AdamW and the learning-rate schedule."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class OptimConfig:
    lr: float = setting(1e-6, gt=0)
    """Learning rate after the warm-up."""
    betas: list[float] = setting([0.9, 0.999])
    """AdamW's two decay rates."""
    eps: float = setting(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = setting(0.01, ge=0)
    """AdamW's weight decay."""
    decay_norm_and_bias: bool = setting(False)
    """Also decay norm weights, biases and other vectors."""
    lr_scheduler_type: str = setting("constant", choices=("constant", "linear", "cosine"))
    """Shape of the learning rate after the warm-up."""
    lr_scheduler_interval: str = setting("optimizer_step", choices=("optimizer_step", "training_step"))
    """Unit of the schedule and its warm-up: optimizer steps, or training steps with one rate per rollout (as in
    verl)."""
    lr_warmup_steps: int = setting(0, ge=0)
    """Length of the linear warm-up from `lr / lr_warmup_steps` to `lr`, in units of `lr_scheduler_interval`."""
    min_lr_ratio: float = setting(0.0, ge=0, le=1)
    """Final rate of `linear` and `cosine`, as a fraction of `lr`."""
