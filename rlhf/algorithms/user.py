"""Wraps users' estimators and losses so that every call's result is checked."""

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rlhf.algorithms.advantages import Estimate, EstimatorInput
from rlhf.algorithms.losses import PolicyLoss
from rlhf.algorithms.statistics import masked
from rlhf.config import ActorConfig, AlgorithmConfig
from rlhf.errors import UserError


def checked_estimator(
    source: str, function: Callable[..., Any]
) -> Callable[[EstimatorInput, AlgorithmConfig], Estimate]:
    """Wrap the user's estimator, and set its results outside the mask to 0. `source` is the setting with its value.

    Calls raise UserError unless the result is an `Estimate` in the mask's shape [N, R] with finite advantages, and with
    finite returns if there is a critic.
    """

    @wraps(function)
    def estimator(inputs: EstimatorInput, config: AlgorithmConfig) -> Estimate:
        estimate = _call(source, function, inputs, config)
        if not isinstance(estimate, Estimate):
            raise UserError(
                f"{source} returned {_kind(estimate)}. Return rlhf.algorithms.advantages.Estimate(advantages)."
            )
        if inputs.values is not None and estimate.returns is None:
            raise UserError(
                f"{source} returned no returns, but the critic needs returns as targets. "
                "Return Estimate(advantages, returns), or set critic.enable=null."
            )
        advantages = _masked_and_finite(source, "advantages", estimate.advantages, inputs)
        returns = None if estimate.returns is None else _masked_and_finite(source, "returns", estimate.returns, inputs)
        return Estimate(advantages, returns)

    return estimator


def checked_policy_loss(source: str, function: Callable[..., Any]) -> Callable[..., PolicyLoss]:
    """Wrap the user's policy loss; `source` is the setting with its value.

    Calls raise UserError unless the result is a `PolicyLoss` whose losses (with a gradient) and metrics have the mask's
    shape [N, R]. The guards check that losses are finite.
    """

    @wraps(function)
    def policy_loss(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
    ) -> PolicyLoss:
        loss = _call(source, function, log_probs, old_log_probs, advantages, mask, config)
        if not isinstance(loss, PolicyLoss):
            raise UserError(
                f"{source} returned {_kind(loss)}. Return rlhf.algorithms.losses.PolicyLoss(losses, metrics)."
            )
        for name, tensor in {"losses": loss.losses, **loss.metrics}.items():
            _check_shape(source, name, tensor, mask)
        if log_probs.requires_grad and not loss.losses.requires_grad:
            raise UserError(f"{source} returned losses without a gradient. Compute them from log_probs, not detached.")
        return loss

    return policy_loss


def _call(source: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function; raise its errors as UserError with a traceback, because a restart would repeat them.

    Errors of devices, memory or other ranks propagate unchanged, because a restart may fix them.
    """
    try:
        return function(*arguments)
    except (UserError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError):
        raise
    except Exception as error:
        # Drop this frame, so that the traceback begins with the user's frame.
        theirs = error.__traceback__ and error.__traceback__.tb_next
        lines = "".join(traceback.format_exception(type(error), error, theirs)).rstrip()
        raise UserError(f"{source} raised an error, which ends the run. Fix the function.\n{lines}") from error


def _masked_and_finite(source: str, name: str, tensor: Any, inputs: EstimatorInput) -> Tensor:
    _check_shape(source, name, tensor, inputs.mask)
    inside = masked(tensor, inputs.mask).to(inputs.token_rewards.dtype)
    if not torch.isfinite(inside).all():
        raise UserError(f"{source} returned {name} that are not finite. Fix the function or the rewards.")
    return inside


def _check_shape(source: str, name: str, tensor: Any, mask: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != mask.shape or not tensor.is_floating_point():
        raise UserError(
            f"{source} returned {name} of {_kind(tensor)}. Return floating-point numbers of the mask's shape, "
            f"{list(mask.shape)}."
        )


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
