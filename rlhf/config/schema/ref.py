"""Section `ref`: the reference policy and its updates."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting
from rlhf.config.schema.fsdp import FrozenFsdpConfig


@dataclass
class RefConfig:
    """The reference policy, loaded only if a KL term needs it."""

    log_prob_max_token_len_per_gpu: int | None = setting(None, ge=1, resume="harmless")
    """Tokens per forward pass on one rank; null means `actor.ppo_max_token_len_per_gpu`."""
    update_freq: int | None = setting(None, ge=1)
    """Steps between updates of the reference towards the actor; null never updates the reference."""
    alpha: float = setting(0.6, gt=0, le=1)
    """Actor's weight in an update: ref = alpha * actor + (1 - alpha) * ref."""
    fsdp_config: FrozenFsdpConfig = setting(FrozenFsdpConfig)
