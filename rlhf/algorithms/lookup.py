"""Looks up estimators and policy losses: built-in by name, or the user's as `path/to/file.py:function`."""

from collections.abc import Callable

from rlhf.algorithms import advantages, losses
from rlhf.algorithms.advantages import Estimate, EstimatorInput
from rlhf.algorithms.losses import PolicyLoss
from rlhf.algorithms.user import checked_estimator, checked_policy_loss
from rlhf.config import AlgorithmConfig
from rlhf.config.algorithm_table import ESTIMATORS, POLICY_LOSSES
from rlhf.config.user_functions import load_function

AdvantageEstimator = Callable[[EstimatorInput, AlgorithmConfig], Estimate]
PolicyLossFunction = Callable[..., PolicyLoss]
"""Takes log-probs, log-probs before the update, advantages and mask, [N, R] each, and the settings `actor`.

A loss that selects tokens (see `POLICY_LOSSES`) also takes the chosen tokens, [N, R]."""


def load_estimator(name: str) -> AdvantageEstimator:
    """Return the function of `algorithm.adv_estimator`; a user's function is wrapped by `checked_estimator`."""
    if name in ESTIMATORS:
        return getattr(advantages, name)
    setting = "algorithm.adv_estimator"
    return checked_estimator(f"{setting}={name}", load_function(setting, name))


def load_policy_loss(name: str) -> PolicyLossFunction:
    """Return the function of `actor.policy_loss.loss_mode`; a user's function is wrapped by `checked_policy_loss`."""
    if name in POLICY_LOSSES:
        return getattr(losses, name)
    setting = "actor.policy_loss.loss_mode"
    return checked_policy_loss(f"{setting}={name}", load_function(setting, name))
