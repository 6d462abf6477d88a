"""Section `guards`: bounds for a batch and what follows beyond them."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class GuardsConfig:
    """Bounds that end the update of a batch before it can do harm. A loss or gradient that is not finite always
    does."""

    action: str = setting("skip", choices=("skip", "rollback", "stop"))
    """`skip` the rest of the batch; `rollback` to the last checkpoint and leave out the batch's data from there; `stop`
    the run."""
    max_loss: float | None = setting(None, gt=0)
    """Largest size of a mini-batch's policy or value loss."""
    max_kl: float | None = setting(None, gt=0)
    """Largest KL of a mini-batch, per token (k3), to the policy before the update and to the reference if there is
    one."""
    max_reward_drop: float | None = setting(None, gt=0)
    """Largest distance of a batch's mean reward below its moving average over the steps before."""
    max_events: int = setting(5, ge=1)
    """Batches in a row that guards may refuse before the run ends with the evidence."""
