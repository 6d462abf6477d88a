from dataclasses import dataclass

from rlhf.config.fields import setting


@dataclass
class OptimConfig:
    lr: float = setting(1e-6, gt=0)
    betas: list[float] = setting([0.9, 0.999])
    eps: float = setting(1e-8, gt=0)
    weight_decay: float = setting(0.01, ge=0)
    lr_scheduler_type: str = setting("constant", choices=("constant", "linear", "cosine"))
    """Shape of the learning rate after the warm-up."""
    lr_warmup_steps: int = setting(0, ge=0)
    """Optimizer steps over which the rate rises linearly from 0."""
    min_lr_ratio: float = setting(0.0, ge=0, le=1)
    """Where `linear` and `cosine` end, as a share of `lr`."""


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = setting(64, ge=1)
    """Prompts per optimizer step over all ranks (each with its `rollout.n` samples)."""
    ppo_micro_batch_size_per_gpu: int = setting(64, ge=1, resume="harmless")
    """Samples per forward and backward pass on one rank. Changes memory and speed, not the gradient (up to rounding)."""
    ppo_epochs: int = setting(1, ge=1)
    """Passes of the optimizer over each batch."""
    clip_ratio_low: float = setting(0.2, ge=0)
    clip_ratio_high: float = setting(0.2, ge=0)
    loss_agg_mode: str = setting("token-mean", choices=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"))
    """How token losses become one number; always over all ranks and micro-batches."""
    use_kl_loss: bool = setting(False)
    """Add the KL to the reference policy (the starting weights) to the loss."""
    kl_loss_coef: float = setting(0.001, ge=0)
    kl_loss_type: str = setting("k3", choices=("k1", "k2", "k3"))
    entropy_coeff: float = setting(0.0, ge=0)
    """Weight of the entropy bonus."""
    grad_clip: float = setting(1.0, gt=0)
    """Largest norm of the gradient over all ranks."""
    optim: OptimConfig = setting(OptimConfig)
