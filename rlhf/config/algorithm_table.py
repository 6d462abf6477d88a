"""Defines the algorithms as a table, with the estimators and policy losses that they combine.

An algorithm is an advantage estimator, a policy loss and their settings. To add an algorithm, write its pure functions
in `rlhf/algorithms`, add their names to `ESTIMATORS` or `POLICY_LOSSES`, and add a row to `ALGORITHMS` and the same row
as conf/algorithm/NAME.yaml.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Estimator:
    """Requirements of an advantage estimator, a function of the same name in `rlhf.algorithms.advantages`."""

    critic: bool = False
    """Uses values, and returns the targets that the critic is fitted to."""
    group: bool = False
    """Compares the samples of one prompt."""
    greedy_baseline: bool = False
    """Compares each sample with the greedy response to the same prompt."""


ESTIMATORS = {
    "gae": Estimator(critic=True),
    "grpo": Estimator(group=True),
    "rloo": Estimator(group=True),
    "reinforce_plus_plus": Estimator(),
    "reinforce_plus_plus_baseline": Estimator(group=True),
    "remax": Estimator(greedy_baseline=True),
    "pass_at_k": Estimator(group=True),
}


POLICY_LOSSES: dict[str, Literal["at random", "largest", "none"]] = {
    "vanilla": "none",
    "gspo": "none",
    "cispo": "none",
    "sapo": "none",
    "clip_cov": "at random",
    "kl_cov": "largest",
}
"""Maps each policy loss to how it selects tokens of a mini-batch by the covariance of log-probs and advantages. The
function of the same name in `rlhf.algorithms.losses` computes the loss."""

SETTINGS_OF_ONE_FUNCTION = {
    "algorithm.pass_at_k": "pass_at_k",
    "actor.policy_loss.clip_cov_ratio": "clip_cov",
    "actor.policy_loss.clip_cov_lb": "clip_cov",
    "actor.policy_loss.clip_cov_ub": "clip_cov",
    "actor.policy_loss.kl_cov_ratio": "kl_cov",
    "actor.policy_loss.ppo_kl_coef": "kl_cov",
    "actor.tau_pos": "sapo",
    "actor.tau_neg": "sapo",
}
"""Maps each setting that only one estimator or policy loss reads to this estimator or policy loss."""

COMMON: dict[str, Any] = {
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.kl_penalty": "k1",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.filter_groups.enable": False,
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "actor.clip_ratio_c": 3.0,
    "actor.loss_scale_factor": None,
    "actor.kl_loss_coef": 0.001,
    "actor.kl_loss_type": "k3",
    "actor.entropy_coeff": 0.0,
    "reward.overlong_buffer.enable": False,
}
"""Settings that every algorithm sets, unless its row overrides them."""


@dataclass(frozen=True)
class Algorithm:
    """One row: the algorithm's estimator and loss, and its `changes` to `COMMON`."""

    adv_estimator: str
    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    kl: Literal["reward", "loss", "none"] = "none"
    """Where the KL to the reference policy is added."""
    changes: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Return all settings of the algorithm by dotted name, as in conf/algorithm/NAME.yaml."""
        return {
            "algorithm.adv_estimator": self.adv_estimator,
            "algorithm.use_kl_in_reward": self.kl == "reward",
            "actor.policy_loss.loss_mode": self.loss_mode,
            "actor.loss_agg_mode": self.loss_agg_mode,
            "actor.use_kl_loss": self.kl == "loss",
            **COMMON,
            **self.changes,
        }


# conf/algorithm/NAME.yaml cites the sources of the values.
ALGORITHMS = {
    "ppo": Algorithm("gae", kl="reward"),
    "grpo": Algorithm("grpo", kl="loss"),
    "dr_grpo": Algorithm(
        "grpo", loss_agg_mode="seq-mean-token-sum-norm", changes={"algorithm.norm_adv_by_std_in_grpo": False}
    ),
    "dapo": Algorithm(
        "grpo",
        changes={
            "algorithm.filter_groups.enable": True,
            "actor.clip_ratio_high": 0.28,
            "actor.clip_ratio_c": 10.0,
            "reward.overlong_buffer.enable": True,
        },
    ),
    "rloo": Algorithm("rloo", kl="reward"),
    "reinforce_plus_plus": Algorithm("reinforce_plus_plus", kl="reward"),
    "reinforce_plus_plus_baseline": Algorithm(
        "reinforce_plus_plus_baseline", kl="loss", changes={"actor.kl_loss_type": "k2"}
    ),
    "remax": Algorithm("remax", kl="reward"),
    "gspo": Algorithm(
        "grpo",
        loss_mode="gspo",
        loss_agg_mode="seq-mean-token-mean",
        changes={"actor.clip_ratio_low": 0.0003, "actor.clip_ratio_high": 0.0004},
    ),
    "cispo": Algorithm("grpo", loss_mode="cispo", changes={"actor.clip_ratio_low": 1.0}),
    "sapo": Algorithm("grpo", loss_mode="sapo", loss_agg_mode="seq-mean-token-mean"),
    "clip_cov": Algorithm("grpo", loss_mode="clip_cov"),
    "kl_cov": Algorithm("grpo", loss_mode="kl_cov"),
    "pass_at_k": Algorithm("pass_at_k"),
}
