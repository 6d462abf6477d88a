"""Section `critic`: the value function and its optimizer."""

from dataclasses import dataclass

from rlhf.config.schema.actor import LOSS_AGG_MODES
from rlhf.config.schema.fields import setting
from rlhf.config.schema.fsdp import TrainedFsdpConfig
from rlhf.config.schema.optim import OptimConfig


@dataclass
class CriticConfig:
    enable: bool | None = setting(None)
    """Train a critic; null means when `algorithm.adv_estimator` needs one (`gae`)."""
    path: str | None = setting(None, resume="harmless")
    """The causal LM that the critic starts from, as `model.path`; null takes that one. A resume compares what it
    holds."""
    ppo_max_token_len_per_gpu: int | None = setting(None, ge=1, resume="harmless")
    """Tokens per forward and backward pass on one rank; null takes the actor's."""
    forward_max_token_len_per_gpu: int | None = setting(None, ge=1, resume="harmless")
    """Tokens per forward pass on one rank, for the values before the update; null takes the critic's number above."""
    use_remove_padding: bool | None = setting(None, resume="harmless")
    """Sequences in one row without padding, as for the actor."""
    ppo_epochs: int = setting(1, ge=1)
    """Passes of the critic's optimizer over each batch, in mini-batches of `actor.ppo_mini_batch_size` prompts."""
    cliprange_value: float = setting(0.5, gt=0)
    """Largest move of a value from the one before the update that still lowers the loss."""
    loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES)
    """Aggregation of token losses to one number, as for the actor."""
    grad_clip: float = setting(1.0, gt=0)
    """Largest norm of the gradient over all ranks."""
    optim: OptimConfig = setting(lambda: OptimConfig(lr=1e-5))
    fsdp_config: TrainedFsdpConfig = setting(TrainedFsdpConfig)
