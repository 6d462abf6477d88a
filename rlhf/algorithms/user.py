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


def checked_estimator(said: str, function: Callable[..., Any]) -> Callable[[EstimatorInput, AlgorithmConfig], Estimate]:
    """Wrap the user's estimator; `said` is the setting with its value. Sets advantages outside the mask to 0.

    Calls raise UserError unless the result is an `Estimate` in the mask's shape [N, R] with finite advantages, and with
    finite returns if there is a critic.
    """

    @wraps(function)
    def estimator(inputs: EstimatorInput, config: AlgorithmConfig) -> Estimate:
        estimate = _called(said, function, inputs, config)
        if not isinstance(estimate, Estimate):
            raise UserError(
                f"{said} returned {_kind(estimate)}. Return rlhf.algorithms.advantages.Estimate(advantages)."
            )
        if inputs.values is not None and estimate.returns is None:
            raise UserError(
                f"{said} returned no returns, but the run has a critic that is fitted to them. "
                "Return Estimate(advantages, returns), or set critic.enable=null."
            )
        advantages = _inside(said, "advantages", estimate.advantages, inputs)
        returns = None if estimate.returns is None else _inside(said, "returns", estimate.returns, inputs)
        return Estimate(advantages, returns)

    return estimator


def checked_policy_loss(said: str, function: Callable[..., Any]) -> Callable[..., PolicyLoss]:
    """Wrap the user's policy loss; `said` is the setting with its value.

    Calls raise UserError unless the result is a `PolicyLoss` whose losses (with a gradient) and figures have the mask's
    shape [N, R]. The guards check that losses are finite.
    """

    @wraps(function)
    def policy_loss(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
    ) -> PolicyLoss:
        loss = _called(said, function, log_probs, old_log_probs, advantages, mask, config)
        if not isinstance(loss, PolicyLoss):
            raise UserError(
                f"{said} returned {_kind(loss)}. Return rlhf.algorithms.losses.PolicyLoss(losses, figures)."
            )
        for name, tensor in {"losses": loss.losses, **loss.figures}.items():
            _check_shape(said, name, tensor, mask)
        if log_probs.requires_grad and not loss.losses.requires_grad:
            raise UserError(f"{said} returned losses without a gradient. Compute them from log_probs, not detached.")
        return loss

    return policy_loss


def _called(said: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function; raise its errors as UserError with a traceback, because a restart would repeat them.

    Errors of devices, memory or other ranks propagate, because a restart may cure them.
    """
    try:
        return function(*arguments)
    except (UserError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError):
        raise
    except Exception as error:
        # Drop this frame, so that the traceback begins with the user's.
        theirs = error.__traceback__ and error.__traceback__.tb_next
        lines = "".join(traceback.format_exception(type(error), error, theirs)).rstrip()
        raise UserError(f"{said} raised an error, which ends the run. Correct it.\n{lines}") from error


def _inside(said: str, name: str, tensor: Any, inputs: EstimatorInput) -> Tensor:
    _check_shape(said, name, tensor, inputs.mask)
    inside = masked(tensor, inputs.mask).to(inputs.token_rewards.dtype)
    if not torch.isfinite(inside).all():
        raise UserError(f"{said} returned {name} that are not finite. Correct it, or the rewards that lead there.")
    return inside


def _check_shape(said: str, name: str, tensor: Any, mask: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != mask.shape or not tensor.is_floating_point():
        raise UserError(
            f"{said} returned {name} of {_kind(tensor)}. Return floating-point numbers of the mask's shape, "
            f"{list(mask.shape)}."
        )


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
