"""Section `tracking`: progress display and wandb."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class WandbConfig:
    mode: str = setting("online", choices=("online", "offline"), resume="harmless")
    """`offline` writes files for `wandb sync`."""
    entity: str | None = setting(None, resume="harmless")
    """wandb user or team; null means the login's default."""
    tags: list[str] = setting([], resume="harmless")
    """Tags of the run on wandb."""


@dataclass
class TrackingConfig:
    progress: str = setting("auto", choices=("auto", "live", "plain"), resume="harmless")
    """`live` bar or `plain` lines; `auto` is `live` if standard error is a terminal (under torchrun: `plain`)."""
    wandb: WandbConfig = setting(WandbConfig, resume="harmless")
