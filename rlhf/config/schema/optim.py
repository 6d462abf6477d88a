"""Optimizer settings of actor and critic: AdamW and the learning-rate schedule."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class OptimConfig:
    lr: float = setting(1e-6, gt=0)
    """Learning rate after the warm-up."""
    betas: list[float] = setting([0.9, 0.999])
    """AdamW's decay rates of its two moments."""
    eps: float = setting(1e-8, gt=0)
    """AdamW's term against division by zero."""
    weight_decay: float = setting(0.01, ge=0)
    """AdamW's weight decay."""
    decay_norm_and_bias: bool = setting(False)
    """Weight decay also of the weights of norms, of biases and of other vectors, which without it have none."""
    lr_scheduler_type: str = setting("constant", choices=("constant", "linear", "cosine"))
    """Shape of the learning rate after the warm-up."""
    lr_scheduler_interval: str = setting("optimizer_step", choices=("optimizer_step", "training_step"))
    """Steps that the schedule and its warm-up count: the optimizer's, of which a training step has `ppo_epochs` for
    each mini-batch, or training steps, each a rollout, at one rate throughout (verl's way)."""
    lr_warmup_steps: int = setting(0, ge=0)
    """Steps of `lr_scheduler_interval` over which the rate rises linearly from 0."""
    min_lr_ratio: float = setting(0.0, ge=0, le=1)
    """The end of `linear` and `cosine`, as a share of `lr`."""
