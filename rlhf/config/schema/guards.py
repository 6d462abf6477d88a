"""Section `guards`: bounds that reject a batch, and the action after a rejected batch."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class GuardsConfig:
    """Bounds that reject a batch before its update does harm. A loss or gradient that is not finite always rejects its
    batch."""

    action: str = setting("skip", choices=("skip", "rollback", "stop"))
    """After a rejected batch: `skip` the rest of the batch; `rollback` to the last checkpoint and leave out the batch's
    data; `stop` the run."""
    max_loss: float | None = setting(None, gt=0)
    """Largest absolute policy or value loss of a mini-batch; null checks nothing."""
    max_kl: float | None = setting(None, gt=0)
    """Largest KL of a mini-batch per token (k3, at most 10 for each token), to the policy before the update and to the
    reference, if any; null checks nothing."""
    max_reward_drop: float | None = setting(None, gt=0)
    """Largest drop of a batch's mean reward below the moving average of earlier steps; null checks nothing."""
    max_events: int = setting(5, ge=1)
    """Largest number of rejected batches in a row; one more ends the run with a report."""
