"""Lookup of estimators and policy losses: by name among ours, or `path/to/file.py:function` of the user's."""

from collections.abc import Callable
from typing import Any

from rlhf.algorithms import advantages, losses
from rlhf.algorithms.advantages import Estimate, EstimatorInput
from rlhf.algorithms.losses import PolicyLoss
from rlhf.algorithms.user import checked_estimator, checked_policy_loss
from rlhf.config import AlgorithmConfig
from rlhf.config.algorithm_table import ESTIMATORS, POLICY_LOSSES
from rlhf.config.user_functions import load_function

AdvantageEstimator = Callable[[EstimatorInput, AlgorithmConfig], Estimate]
PolicyLossFunction = Callable[..., PolicyLoss]
"""Of log-probs now and before the update, advantages and mask, [N, R] each, and the section `actor`; and of the tokens
that are chosen, [N, R], where `POLICY_LOSSES` says so."""


def load_estimator(name: str) -> AdvantageEstimator:
    """The function of `algorithm.adv_estimator`: a name of `ESTIMATORS` or `path/to/file.py:function`.

    A function of the user's is wrapped: what it returns is checked at each call, and advantages outside the mask become
    0.
    """
    if name in ESTIMATORS:
        ours: Any = getattr(advantages, name)
        return ours
    setting = "algorithm.adv_estimator"
    return checked_estimator(f"{setting}={name}", load_function(setting, name))


def load_policy_loss(name: str) -> PolicyLossFunction:
    """The function of `actor.policy_loss.loss_mode`: a name of `POLICY_LOSSES`, or `path/to/file.py:function`, checked
    at each call."""
    if name in POLICY_LOSSES:
        ours: Any = getattr(losses, name)
        return ours
    setting = "actor.policy_loss.loss_mode"
    return checked_policy_loss(f"{setting}={name}", load_function(setting, name))
