"""Section `actor`: batches, policy loss, optimizer of the policy."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting
from rlhf.config.schema.fsdp import TrainedFsdpConfig
from rlhf.config.schema.optim import OptimConfig

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
"""Estimators of the KL divergence. `k1+`, for example, has the value of `k1` and the gradient of `k2`
(straight-through)."""


@dataclass
class PolicyLossConfig:
    loss_mode: str = setting("vanilla")
    """Policy loss: `vanilla` (PPO's clip), `gspo`, `cispo`, `sapo`, `clip_cov`, `kl_cov`, or
    `path/to/file.py:function`."""
    clip_cov_ratio: float = setting(0.0002, gt=0, le=1)
    """Fraction of a mini-batch's tokens that `clip_cov` masks, at least one token."""
    clip_cov_lb: float = setting(1.0)
    """`clip_cov` masks only tokens whose covariance of log-prob and advantage is above this."""
    clip_cov_ub: float = setting(5.0)
    """`clip_cov` masks only tokens whose covariance of log-prob and advantage is below this."""
    kl_cov_ratio: float = setting(0.0002, gt=0, le=1)
    """Fraction of a mini-batch's tokens that `kl_cov` penalizes, at least one token."""
    ppo_kl_coef: float = setting(0.1, ge=0)
    """Weight of `kl_cov`'s penalty."""


@dataclass
class EntropyCtrlConfig:
    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """`adaptive` adjusts the entropy coefficient to keep the entropy at `target_entropy` or above."""
    target_entropy: float = setting(0.2, ge=0)
    """Target of `adaptive`, mean entropy per token. Above the target there is no bonus."""
    delta: float = setting(0.005, gt=0)
    """After each optimizer step, the coefficient rises by this (entropy below the target) or falls by this."""
    min_coeff: float = setting(0.0, ge=0)
    """Smallest coefficient of `adaptive`."""
    max_coeff: float = setting(1.0, gt=0)
    """Largest coefficient of `adaptive`."""


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = setting(64, ge=1)
    """Prompts per optimizer step over all ranks, each with `rollout.n` samples; also for the critic."""
    ppo_max_token_len_per_gpu: int = setting(16384, ge=1, resume="harmless")
    """Tokens per forward and backward pass on one rank; a longer sample gets a pass of its own. Affects memory and
    speed, not the gradient (up to rounding)."""
    use_remove_padding: bool | None = setting(None, resume="harmless")
    """Pack the sequences of a micro-batch into one row without padding, also for the reference. null packs, or pads
    if a test at the start finds that packed sequences affect each other in the model. With true, this finding ends the
    run. false pads."""
    ppo_epochs: int = setting(1, ge=1)
    """Optimizer passes over each batch."""
    shuffle: bool = setting(False)
    """Shuffle samples into new mini-batches in every epoch, also for the critic. false keeps the samples of consecutive
    prompts together, in data order."""
    policy_loss: PolicyLossConfig = setting(PolicyLossConfig)
    clip_ratio_low: float = setting(0.2, ge=0)
    """Lower clip: the probability ratio is clipped at 1 minus this."""
    clip_ratio_high: float = setting(0.2, ge=0)
    """Upper clip: the probability ratio is clipped at 1 plus this."""
    clip_ratio_c: float = setting(3.0, gt=1)
    """Dual clip: for negative advantages, the loss is at most this times the advantage's absolute value (`vanilla`
    only)."""
    tau_pos: float = setting(1.0, gt=0)
    """SAPO's temperature for positive advantages. Higher gives tokens with a ratio far from 1 less weight (`sapo`
    only)."""
    tau_neg: float = setting(1.05, gt=0)
    """SAPO's temperature for all other advantages (`sapo` only)."""
    loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES)
    """Aggregation of token losses over all ranks and micro-batches."""
    loss_scale_factor: int | None = setting(None, ge=1)
    """Fixed length, in tokens, that `seq-mean-token-sum-norm` divides by; null means `data.max_response_length`."""
    use_kl_loss: bool = setting(False)
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = setting(0.001, ge=0)
    """Weight of the KL in the loss."""
    kl_loss_type: str = setting("k3", choices=KL_KINDS)
    """Estimator of the KL in the loss; verl's `low_var_kl` is `k3`."""
    use_bias_correction_kl: bool = setting(False)
    """Weight the KL in the loss by the probability ratio and by the `rollout_correction` weights, if any. Otherwise the
    gradients of `k1` and `k3` are biased."""
    entropy_coeff: float = setting(0.0, ge=0)
    """Weight of the entropy bonus; with `adaptive`, the starting weight."""
    entropy_ctrl: EntropyCtrlConfig = setting(EntropyCtrlConfig)
    calculate_entropy: bool = setting(True, resume="harmless")
    """Log the policy's entropy (`actor/entropy`) even if the loss does not use it. Costs a few per cent of the update,
    more for a large vocabulary; off in verl."""
    grad_clip: float = setting(1.0, gt=0)
    """Largest gradient norm over all ranks."""
    optim: OptimConfig = setting(OptimConfig)
    fsdp_config: TrainedFsdpConfig = setting(TrainedFsdpConfig)

    @property
    def needs_entropy(self) -> bool:
        """Return whether the update must compute the entropy, for the loss or as a metric."""
        return self.entropy_coeff > 0 or self.entropy_ctrl.type == "adaptive" or self.calculate_entropy

    @property
    def kl_in_loss(self) -> bool:
        """Return whether the loss has a KL term with a weight above 0, which needs the reference policy."""
        return self.use_kl_loss and self.kl_loss_coef > 0
