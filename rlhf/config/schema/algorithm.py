"""Section `algorithm`: advantages, KL in the reward, dynamic sampling, rollout correction."""

from dataclasses import dataclass

from rlhf.config.schema.actor import KL_KINDS
from rlhf.config.schema.fields import setting

ROLLOUT_RS = (
    *(f"token_{divergence}" for divergence in ("k1", "k2", "k3")),
    *(f"seq_{of_all}_{divergence}" for of_all in ("sum", "mean") for divergence in ("k1", "k2", "k3")),
    *(f"seq_max_{divergence}" for divergence in ("k2", "k3")),
)
"""Measures of the difference between the trainer's and the rollout engine's policies, per token or response."""


@dataclass
class KlCtrlConfig:
    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """`adaptive` steers the KL towards `target_kl`."""
    kl_coef: float = setting(0.001, ge=0)
    """Weight of the KL in the reward; with `adaptive`, the starting weight."""
    target_kl: float = setting(0.1, gt=0)
    """Target KL per token of `adaptive`."""
    horizon: int = setting(10000, ge=1)
    """Samples over which the adaptive coefficient reacts (verl's `horizon`): more samples, slower changes."""


@dataclass
class FilterGroupsConfig:
    enable: bool = setting(False)
    """Drop prompts whose samples all have the same `metric`, and generate until the batch is full (DAPO's dynamic
    sampling)."""
    metric: str = setting("acc", choices=("acc", "seq_reward"))
    """Metric that must differ within a group: `acc` is the score of the first of `reward.functions`, `seq_reward` the
    total reward."""
    max_num_gen_batches: int = setting(10, ge=1)
    """Largest number of generations per step."""
    on_limit: str = setting("fill", choices=("fill", "stop"))
    """If `max_num_gen_batches` generations do not fill the batch: `fill` it with dropped groups, or `stop` the run."""


@dataclass
class RolloutCorrectionConfig:
    rollout_is: str | None = setting(None, choices=("token", "sequence"))
    """Truncated importance sampling between the rollout engine's log-probs and the trainer's, by `token` or `sequence`.
    With null, only tokens of an older policy get weights, by `token`."""
    rollout_is_threshold: float = setting(2.0, gt=0)
    """Largest importance weight."""
    rollout_is_threshold_lower: float | None = setting(None, gt=0)
    """Smallest importance weight. If set, weights below it or above `rollout_is_threshold` become 0 (IcePop; verl's
    threshold `0.5_5.0`). null: larger weights
    become `rollout_is_threshold`."""
    rollout_rs: str | None = setting(None, choices=ROLLOUT_RS)
    """Mask tokens, or whole responses (`seq_`), on which the trainer's and the rollout engine's policies differ too
    much. Needs one more forward pass if the batch is a single optimizer step."""
    rollout_rs_threshold: float | None = setting(None, gt=0)
    """Largest divergence that is not masked; for `k1`, the largest probability ratio."""
    rollout_rs_threshold_lower: float | None = setting(None, gt=0)
    """Smallest probability ratio for `k1`; null means 1 / `rollout_rs_threshold`."""


@dataclass
class AlgorithmConfig:
    adv_estimator: str = setting("grpo")
    """Advantage estimator: a name in `rlhf/config/algorithm_table.py`, or `path/to/file.py:function`."""
    gamma: float = setting(1.0, gt=0, le=1)
    """Discount per token, for `gae` and `reinforce_plus_plus`."""
    lam: float = setting(1.0, ge=0, le=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = setting(True)
    """Divide group advantages by the group's standard deviation; false is Dr.GRPO."""
    pass_at_k: int = setting(2, ge=1)
    """The k of the estimator `pass_at_k`, which rewards at least one correct response among k. Must be less than
    `rollout.n`."""
    mask_truncated_responses: bool = setting(False)
    """Mask responses that reached `data.max_response_length` (DAPO's overlong filtering). Their rewards still count in
    group baselines."""
    normalize_reward: str | None = setting(None, choices=("batch", "running"))
    """Standardize each response's reward by the mean and standard deviation of the step (`batch`) or of all steps so
    far (`running`). Applies before the KL in the reward and the advantages."""
    reward_clip_range: list[float] | None = setting(None)
    """Lowest and highest reward after normalization; null does not clip."""
    use_kl_in_reward: bool = setting(False)
    """Subtract the KL to the reference policy from the reward of each token."""
    kl_penalty: str = setting("k1", choices=KL_KINDS)
    """Estimator of the KL in the reward."""
    kl_ctrl: KlCtrlConfig = setting(KlCtrlConfig)
    filter_groups: FilterGroupsConfig = setting(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = setting(RolloutCorrectionConfig)

    @property
    def kl_in_reward(self) -> bool:
        """Return whether the reward has a KL term with a weight above 0, which needs the reference policy."""
        return self.use_kl_in_reward and self.kl_ctrl.kl_coef > 0
