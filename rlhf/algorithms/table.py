"""What the algorithms are: one row each. Imports no torch, so that a wrong name is answered before anything heavy is loaded.

An algorithm is an estimator of advantages, a policy loss and the settings that belong to them. To add one: its pure functions, their
names in `ESTIMATORS` or `POLICY_LOSSES`, a row in `ALGORITHMS` and the same row as conf/algorithm/NAME.yaml.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlhf.config import ActorConfig, AlgorithmConfig, Config
from rlhf.config.schema import did_you_mean, nearest
from rlhf.errors import UserError
from rlhf.user_functions import check_positional, load_function

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.algorithms.advantages import Estimate, EstimatorInput
    from rlhf.algorithms.losses import PolicyLoss

    AdvantageEstimator = Callable[[EstimatorInput, AlgorithmConfig], Estimate]
    PolicyLossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, ActorConfig], PolicyLoss]


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages, and what that needs of the rest of the run."""

    function: str
    """`module:function`, called as function(inputs, config.algorithm)."""
    critic: bool = False
    """Uses values and gives the returns that a critic is fitted to."""
    group: bool = False
    """Compares the samples of one prompt."""
    greedy_baseline: bool = False
    """Compares each sample with the greedy response to the same prompt."""


ESTIMATORS = {
    "gae": Estimator("rlhf.algorithms.advantages:gae", critic=True),
    "grpo": Estimator("rlhf.algorithms.advantages:grpo", group=True),
    "rloo": Estimator("rlhf.algorithms.advantages:rloo", group=True),
    "reinforce_plus_plus": Estimator("rlhf.algorithms.advantages:reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": Estimator("rlhf.algorithms.advantages:reinforce_plus_plus_baseline", group=True),
    "remax": Estimator("rlhf.algorithms.advantages:remax", greedy_baseline=True),
}
POLICY_LOSSES = {
    "vanilla": "rlhf.algorithms.losses:vanilla",
    "gspo": "rlhf.algorithms.losses:gspo",
    "cispo": "rlhf.algorithms.losses:cispo",
}

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
"""What a row sets unless it says otherwise, so that every algorithm sets the same settings."""


@dataclass(frozen=True)
class Algorithm:
    """One row: what the algorithm is made of, and where it departs from `COMMON`."""

    adv_estimator: str
    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    kl: Literal["reward", "loss", "none"] = "none"
    """Where the KL to the reference policy goes."""
    others: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """All that the algorithm sets: dotted setting -> value; conf/algorithm/NAME.yaml holds the same."""
        return {
            "algorithm.adv_estimator": self.adv_estimator,
            "algorithm.use_kl_in_reward": self.kl == "reward",
            "actor.policy_loss.loss_mode": self.loss_mode,
            "actor.loss_agg_mode": self.loss_agg_mode,
            "actor.use_kl_loss": self.kl == "loss",
            **COMMON,
            **self.others,
        }


# The sources of the values stand in conf/algorithm/NAME.yaml.
ALGORITHMS = {
    "ppo": Algorithm("gae", kl="reward"),
    "grpo": Algorithm("grpo", kl="loss"),
    "dr_grpo": Algorithm(
        "grpo", loss_agg_mode="seq-mean-token-sum-norm", others={"algorithm.norm_adv_by_std_in_grpo": False}
    ),
    "dapo": Algorithm(
        "grpo",
        others={
            "algorithm.filter_groups.enable": True,
            "actor.clip_ratio_high": 0.28,
            "actor.clip_ratio_c": 10.0,
            "reward.overlong_buffer.enable": True,
        },
    ),
    "rloo": Algorithm("rloo", kl="reward"),
    "reinforce_plus_plus": Algorithm("reinforce_plus_plus", kl="reward"),
    "reinforce_plus_plus_baseline": Algorithm(
        "reinforce_plus_plus_baseline", kl="loss", others={"actor.kl_loss_type": "k2"}
    ),
    "remax": Algorithm("remax", kl="reward"),
    "gspo": Algorithm(
        "grpo",
        loss_mode="gspo",
        loss_agg_mode="seq-mean-token-mean",
        others={"actor.clip_ratio_low": 0.0003, "actor.clip_ratio_high": 0.0004},
    ),
    "cispo": Algorithm("grpo", loss_mode="cispo", others={"actor.clip_ratio_low": 1.0}),
}

ESTIMATOR_TAKES = ("inputs", "config")
POLICY_LOSS_TAKES = ("log_probs", "old_log_probs", "advantages", "mask", "config")


def load_estimator(name: str) -> AdvantageEstimator:
    """The function of `algorithm.adv_estimator`: a name of `ESTIMATORS` or `path/to/file.py:function`.

    A function of the user's is wrapped: what it returns is checked at each call, and advantages outside the mask become 0.
    """
    if name in ESTIMATORS:
        return _resolve(ESTIMATORS[name].function)
    from rlhf.algorithms.user import checked_estimator

    setting = "algorithm.adv_estimator"
    return checked_estimator(f"{setting}={name}", load_function(setting, name))


def load_policy_loss(name: str) -> PolicyLossFunction:
    """The function of `actor.policy_loss.loss_mode`: a name of `POLICY_LOSSES` or `path/to/file.py:function`, then checked at each call."""
    if name in POLICY_LOSSES:
        return _resolve(POLICY_LOSSES[name])
    from rlhf.algorithms.user import checked_policy_loss

    setting = "actor.policy_loss.loss_mode"
    return checked_policy_loss(f"{setting}={name}", load_function(setting, name))


def _resolve(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def needs_critic(config: Config) -> bool:
    """Whether a critic is trained: as `critic.enable` says, or else when the estimator uses values."""
    enabled = config.critic.enable
    return _estimator(config).critic if enabled is None else enabled


def needs_reference(config: Config) -> bool:
    """Whether any KL term with a weight compares the policy with the reference."""
    in_loss = config.actor.use_kl_loss and config.actor.kl_loss_coef > 0
    in_reward = config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef > 0
    return in_loss or in_reward


def needs_greedy_baseline(config: Config) -> bool:
    """Whether each prompt also gets a greedy response, whose reward is the estimator's baseline."""
    return _estimator(config).greedy_baseline


def _estimator(config: Config) -> Estimator:
    name = config.algorithm.adv_estimator
    return ESTIMATORS.get(name, Estimator(name))


def check_algorithm(config: Config) -> None:
    """Check the names, the files of the user's (without running them) and what the estimator needs of the rest of the run.

    Raises:
        UserError: with every problem found, one per line, each naming the setting, its value and the remedy.
    """
    names = (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ESTIMATORS, ESTIMATOR_TAKES),
        ("actor.policy_loss.loss_mode", config.actor.policy_loss.loss_mode, POLICY_LOSSES, POLICY_LOSS_TAKES),
    )
    problems = [problem for name in names if (problem := _wrong_name(*name))]
    problems += [*_samples(config), *_critic(config), *_reference(config)]
    if problems:
        raise UserError("\n".join(problems))


def _wrong_name(setting: str, name: str, known: Mapping[str, Any], takes: tuple[str, ...]) -> str | None:
    if name in known:
        return None
    if ":" in name:
        try:
            check_positional(setting, name, takes)
        except UserError as error:
            return str(error)
        return None
    if name in ALGORITHMS:
        return f"{setting}={name}: {name} is a whole algorithm; write algorithm={name}."
    return (
        f"{setting}={name}: must be one of {', '.join(known)}, or path/to/file.py:function."
        f"{did_you_mean(nearest(name, known))}"
    )


def _samples(config: Config) -> Iterator[str]:
    name, rollout = config.algorithm.adv_estimator, config.rollout
    estimator = _estimator(config)
    if estimator.group and rollout.n < 2:
        yield f"rollout.n={rollout.n}: {name} compares the samples of one prompt; set rollout.n to 2 or more."
    if estimator.greedy_baseline and (rollout.temperature == 0 or rollout.top_k == 1):
        shown = "rollout.temperature=0" if rollout.temperature == 0 else "rollout.top_k=1"
        yield (
            f"{shown}: {name} compares samples with the greedy response, and these would equal it; "
            "set rollout.temperature=1.0 and rollout.top_k=-1."
        )


def _critic(config: Config) -> Iterator[str]:
    name, enabled, warmup = config.algorithm.adv_estimator, config.critic.enable, config.trainer.critic_warmup
    if enabled is False and _estimator(config).critic:
        yield f"critic.enable=false: {name} needs values; set critic.enable=null, or another algorithm.adv_estimator."
    if enabled and name in ESTIMATORS and not ESTIMATORS[name].critic:
        yield f"critic.enable=true: {name} gives no returns to fit a critic to; set critic.enable=null."
    if warmup and not needs_critic(config):
        yield f"trainer.critic_warmup={warmup}: {name} trains no critic; set trainer.critic_warmup=0."


def _reference(config: Config) -> Iterator[str]:
    if config.ref.update_freq is not None and not needs_reference(config):
        yield (
            f"ref.update_freq={config.ref.update_freq}: no KL compares the policy with a reference; set ref.update_freq=null, "
            "or actor.use_kl_loss=true or algorithm.use_kl_in_reward=true with a coefficient above 0."
        )
