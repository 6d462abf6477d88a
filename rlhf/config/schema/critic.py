"""Section `critic`: the value function and its optimizer."""

from dataclasses import dataclass

from rlhf.config.schema.actor import LOSS_AGG_MODES
from rlhf.config.schema.fields import setting
from rlhf.config.schema.fsdp import TrainedFsdpConfig
from rlhf.config.schema.optim import OptimConfig


@dataclass
class CriticConfig:
    enable: bool | None = setting(None)
    """Train a critic; null means only if `algorithm.adv_estimator` needs a critic (`gae`)."""
    path: str | None = setting(None, resume="harmless")
    """Causal LM to initialize the critic from, a folder or Hub name; null means `model.path`. A resume compares the
    content, not the path."""
    ppo_max_token_len_per_gpu: int | None = setting(None, ge=1, resume="harmless")
    """Tokens per forward and backward pass on one rank; null means `actor.ppo_max_token_len_per_gpu`."""
    forward_max_token_len_per_gpu: int | None = setting(None, ge=1, resume="harmless")
    """Tokens per forward pass on one rank, for the values before the update; null means
    `critic.ppo_max_token_len_per_gpu`."""
    use_remove_padding: bool | None = setting(None, resume="harmless")
    """Pack sequences without padding, as `actor.use_remove_padding`."""
    ppo_epochs: int = setting(1, ge=1)
    """Optimizer passes of the critic over each batch, in mini-batches of `actor.ppo_mini_batch_size` prompts."""
    cliprange_value: float = setting(0.5, gt=0)
    """PPO's value clip: moving a value farther than this from its value before the update does not lower the loss."""
    loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES)
    """Aggregation of token losses over all ranks and micro-batches."""
    grad_clip: float = setting(1.0, gt=0)
    """Largest gradient norm over all ranks."""
    optim: OptimConfig = setting(lambda: OptimConfig(lr=1e-5))
    fsdp_config: TrainedFsdpConfig = setting(TrainedFsdpConfig)
