"""Section `ref`: whether the reference policy moves."""

from dataclasses import dataclass

from rlhf.config.fields import setting


@dataclass
class RefConfig:
    """The reference policy; loaded only when a KL term needs it."""

    update_freq: int | None = setting(None, ge=1)
    """Steps between updates of the reference towards the actor; null keeps it at the starting weights."""
    alpha: float = setting(0.6, gt=0, le=1)
    """Share of the actor in an update: ref = alpha * actor + (1 - alpha) * ref."""
