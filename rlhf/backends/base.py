"""The contract of a training engine: what the update, the rollouts and the checkpoint ask of it."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from rlhf.batch import Batch
from rlhf.checkpoint.snapshot import Role


class FrozenPolicy(Protocol):
    """A policy that is only asked for log-probs, such as the reference."""

    def log_probs(self, batch: Batch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropies) of the response tokens at the rollout temperature, [N, R] float32, with gradients when enabled.

        Collective: every rank passes a batch of as many rows.
        """


class TrainingBackend(FrozenPolicy, Role, Protocol):
    """A policy in training, with its optimizer and schedule."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, the sum over all ranks of their losses, to the accumulated one. Collective."""

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, clear gradients. Returns `grad_norm` (over all ranks, before clipping) and the `lr` used."""

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight and persistent buffer, whole, on this rank's device. Collective."""
