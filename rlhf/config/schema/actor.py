"""Section `actor`: batches, policy loss, optimizer of the policy."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting
from rlhf.config.schema.fsdp import TrainedFsdpConfig
from rlhf.config.schema.optim import OptimConfig

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
"""Estimators of the KL divergence; with `+` the value is the estimator's and the gradient k2's (straight-through)."""


@dataclass
class PolicyLossConfig:
    loss_mode: str = setting("vanilla")
    """The policy loss: `vanilla` (PPO's clip), `gspo`, `cispo`, `sapo`, `clip_cov`, `kl_cov`, or
    `path/to/file.py:function`."""
    clip_cov_ratio: float = setting(0.0002, gt=0, le=1)
    """Share of a mini-batch's tokens that `clip_cov` leaves out, at least one."""
    clip_cov_lb: float = setting(1.0)
    """Covariance of log-prob and advantage above which `clip_cov` leaves out a token."""
    clip_cov_ub: float = setting(5.0)
    """Covariance of log-prob and advantage below which `clip_cov` leaves out a token."""
    kl_cov_ratio: float = setting(0.0002, gt=0, le=1)
    """Share of a mini-batch's tokens that have `kl_cov`'s penalty, at least one."""
    ppo_kl_coef: float = setting(0.1, ge=0)
    """Weight of `kl_cov`'s penalty."""


@dataclass
class EntropyCtrlConfig:
    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """`adaptive` moves `entropy_coeff` so that the entropy stays at `target_entropy` or above."""
    target_entropy: float = setting(0.2, ge=0)
    """Mean entropy per token above which there is no bonus, for `adaptive`."""
    delta: float = setting(0.005, gt=0)
    """Change of the coefficient after each optimizer step: up below the target, down above it."""
    min_coeff: float = setting(0.0, ge=0)
    """Least coefficient."""
    max_coeff: float = setting(1.0, gt=0)
    """Largest coefficient."""


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = setting(64, ge=1)
    """Prompts per optimizer step over all ranks (each with its `rollout.n` samples); the critic's, too."""
    ppo_max_token_len_per_gpu: int = setting(16384, ge=1, resume="harmless")
    """Tokens per forward and backward pass on one rank; a longer sample goes alone. Changes memory and speed, not the
    gradient (up to rounding)."""
    use_remove_padding: bool | None = setting(None, resume="harmless")
    """Put the sequences of a micro-batch into one row without padding, in the reference's passes, too. null does where
    a probe of the loaded model finds that they stay apart; true insists on it."""
    ppo_epochs: int = setting(1, ge=1)
    """Passes of the optimizer over each batch."""
    shuffle: bool = setting(False)
    """Draw the samples of each mini-batch anew in every epoch, for the critic as well; false keeps the samples of
    consecutive prompts together, in the order of the data."""
    policy_loss: PolicyLossConfig = setting(PolicyLossConfig)
    clip_ratio_low: float = setting(0.2, ge=0)
    """Lower side of the clip: a ratio of new to old probability counts as at least 1 minus this."""
    clip_ratio_high: float = setting(0.2, ge=0)
    """Upper side of the clip: a ratio counts as at most 1 plus this."""
    clip_ratio_c: float = setting(3.0, gt=1)
    """Dual clip: for negative advantages the loss is at most this times the advantage's size (`vanilla` only)."""
    tau_pos: float = setting(1.0, gt=0)
    """SAPO's temperature for positive advantages: the higher, the less a token counts whose ratio is not near 1 (`sapo`
    only)."""
    tau_neg: float = setting(1.05, gt=0)
    """SAPO's temperature for the other advantages (`sapo` only)."""
    loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES)
    """Aggregation of token losses to one number; always over all ranks and micro-batches."""
    loss_scale_factor: int | None = setting(None, ge=1)
    """The fixed length that `seq-mean-token-sum-norm` divides by; null means `data.max_response_length`."""
    use_kl_loss: bool = setting(False)
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = setting(0.001, ge=0)
    """Weight of that KL."""
    kl_loss_type: str = setting("k3", choices=KL_KINDS)
    """Estimator of that KL; verl's `low_var_kl` is `k3`."""
    use_bias_correction_kl: bool = setting(False)
    """Weigh that KL with the ratio of new to old probability, and with the weights of `rollout_correction` if there are
    any: without it the gradient of `k1` and `k3` is not that of the KL, and the samples are of an older policy."""
    entropy_coeff: float = setting(0.0, ge=0)
    """Weight of the entropy bonus, or where an adaptive one starts."""
    entropy_ctrl: EntropyCtrlConfig = setting(EntropyCtrlConfig)
    calculate_entropy: bool = setting(True, resume="harmless")
    """Measure the policy's entropy (`actor/entropy`) where the loss does not need it. It costs a few per cent of the
    update, more the larger the vocabulary is beside the model; in verl it is off."""
    grad_clip: float = setting(1.0, gt=0)
    """Largest norm of the gradient over all ranks."""
    optim: OptimConfig = setting(OptimConfig)
    fsdp_config: TrainedFsdpConfig = setting(TrainedFsdpConfig)

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy is in the loss or asked for as a figure."""
        return self.entropy_coeff > 0 or self.entropy_ctrl.type == "adaptive" or self.calculate_entropy

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL with a weight, and so needs the reference policy."""
        return self.use_kl_loss and self.kl_loss_coef > 0
