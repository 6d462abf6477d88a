"""Section `tracking`: progress display and wandb."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class WandbConfig:
    mode: str = setting("online", choices=("online", "offline"), resume="harmless")
    """`offline` writes files for `wandb sync`."""
    entity: str | None = setting(None, resume="harmless")
    """User or team on wandb; null takes the login's own."""
    tags: list[str] = setting([], resume="harmless")
    """Tags of the run on wandb."""


@dataclass
class TrackingConfig:
    progress: str = setting("auto", choices=("auto", "live", "plain"), resume="harmless")
    """`live` bar, `plain` lines, or by whether the error stream is a terminal (under torchrun: `plain`)."""
    wandb: WandbConfig = setting(WandbConfig, resume="harmless")
