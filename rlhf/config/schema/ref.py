"""Section `ref`: whether the reference policy moves."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting
from rlhf.config.schema.fsdp import FrozenFsdpConfig


@dataclass
class RefConfig:
    """The reference policy; loaded only when a KL term needs it."""

    log_prob_max_token_len_per_gpu: int | None = setting(None, ge=1, resume="harmless")
    """Tokens per forward pass on one rank; null takes `actor.ppo_max_token_len_per_gpu`."""
    update_freq: int | None = setting(None, ge=1)
    """Steps between updates of the reference towards the actor; null keeps it at the starting weights."""
    alpha: float = setting(0.6, gt=0, le=1)
    """Share of the actor in an update: ref = alpha * actor + (1 - alpha) * ref."""
    fsdp_config: FrozenFsdpConfig = setting(FrozenFsdpConfig)
