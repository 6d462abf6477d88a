"""Section `algorithm`: advantages, KL in the reward, dynamic sampling, rollout correction."""

from dataclasses import dataclass

from rlhf.config.schema.actor import KL_KINDS
from rlhf.config.schema.fields import setting

ROLLOUT_RS = (
    *(f"token_{divergence}" for divergence in ("k1", "k2", "k3")),
    *(f"seq_{of_all}_{divergence}" for of_all in ("sum", "mean") for divergence in ("k1", "k2", "k3")),
    *(f"seq_max_{divergence}" for divergence in ("k2", "k3")),
)
"""Ways to measure how far apart the policies of trainer and rollout engine are on a token or a response."""


@dataclass
class KlCtrlConfig:
    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """`adaptive` moves the coefficient towards `target_kl`."""
    kl_coef: float = setting(0.001, ge=0)
    """The coefficient, or where an adaptive one starts."""
    target_kl: float = setting(0.1, gt=0)
    """KL per token that the adaptive coefficient steers to."""
    horizon: int = setting(10000, ge=1)
    """Samples over which the adaptive coefficient reacts."""


@dataclass
class FilterGroupsConfig:
    enable: bool = setting(False)
    """Drop prompts whose samples all have the same `metric`, and generate until the batch is full (DAPO's dynamic
    sampling)."""
    metric: str = setting("acc", choices=("acc", "seq_reward"))
    """The figure that must differ within a group: `acc` is the first of `reward.functions`, `seq_reward` the whole
    reward."""
    max_num_gen_batches: int = setting(10, ge=1)
    """Generations per step at most."""
    on_limit: str = setting("fill", choices=("fill", "stop"))
    """At the limit: `fill` the batch with groups without signal, or `stop` the run."""
    max_staleness: int = setting(1, ge=0)
    """Oldest policy, in steps before the one in training, whose groups are trained on: what a step has left over waits
    so long for its turn, and is dropped after that. 0 drops all that is left over, as verl does."""


@dataclass
class RolloutCorrectionConfig:
    rollout_is: str | None = setting(None, choices=("token", "sequence"))
    """Truncated importance sampling between the rollout engine's log-probs and the trainer's, by `token` or `sequence`;
    null weighs only samples that are older than the policy, by `token`."""
    rollout_is_threshold: float = setting(2.0, gt=0)
    """Largest weight."""
    rollout_is_threshold_lower: float | None = setting(None, gt=0)
    """Smallest weight: one below it, or above `rollout_is_threshold`, becomes 0 (IcePop's masking on both sides; in
    verl the threshold `0.5_5.0`). null truncates."""
    rollout_rs: str | None = setting(None, choices=ROLLOUT_RS)
    """Rejection: leave tokens, or whole responses (`seq_`), out of the policy's loss where the trainer's policy is too
    far from the rollout engine's, by a divergence of each token and its sum, mean or largest over a response. Needs one
    more forward pass where the batch is one optimizer step."""
    rollout_rs_threshold: float | None = setting(None, gt=0)
    """Largest divergence; for `k1` the largest ratio of the probabilities."""
    rollout_rs_threshold_lower: float | None = setting(None, gt=0)
    """Smallest ratio, for `k1`; null means 1 / `rollout_rs_threshold`."""


@dataclass
class AlgorithmConfig:
    adv_estimator: str = setting("grpo")
    """Estimator of the advantages: a name of `rlhf/config/algorithm_table.py`, or `path/to/file.py:function`."""
    gamma: float = setting(1.0, gt=0, le=1)
    """Discount per token, for `gae` and `reinforce_plus_plus`."""
    lam: float = setting(1.0, ge=0, le=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = setting(True)
    """Divide group advantages by the group's standard deviation; false is Dr.GRPO."""
    pass_at_k: int = setting(2, ge=1)
    """Responses of which one has to be good, for the estimator `pass_at_k`; fewer than `rollout.n`."""
    mask_truncated_responses: bool = setting(False)
    """Train on no token of a response that `data.max_response_length` has cut off (DAPO's overlong filtering); its
    reward still counts in what others are compared with."""
    normalize_reward: str | None = setting(None, choices=("batch", "running"))
    """Subtract from the whole reward of each response the mean, and divide by the standard deviation, of the step's
    responses (`batch`) or of all so far (`running`), before the KL in the reward and the advantages."""
    reward_clip_range: list[float] | None = setting(None)
    """Lowest and highest reward, after the normalisation."""
    use_kl_in_reward: bool = setting(False)
    """Subtract the KL to the reference policy from the reward of each token."""
    kl_penalty: str = setting("k1", choices=KL_KINDS)
    """The estimator of the KL in the reward."""
    kl_ctrl: KlCtrlConfig = setting(KlCtrlConfig)
    filter_groups: FilterGroupsConfig = setting(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = setting(RolloutCorrectionConfig)

    @property
    def kl_in_reward(self) -> bool:
        """Whether the reward has a KL with a weight, and so needs the reference policy."""
        return self.use_kl_in_reward and self.kl_ctrl.kl_coef > 0
