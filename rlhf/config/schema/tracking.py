"""Section `tracking`: progress display, trackers and alerts."""

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
class MlflowConfig:
    tracking_uri: str | None = setting(None, resume="harmless")
    """Address of the MLflow server; null reads MLFLOW_TRACKING_URI."""


ALERTS = ("stuck", "unstable", "crashed", "finished")


@dataclass
class AlertsConfig:
    kinds: list[str] = setting(list(ALERTS), resume="harmless")
    """Alerts to send: `stuck`, `unstable`, `crashed`, `finished`."""
    command: list[str] = setting([], resume="harmless", secret=True)
    """Program and arguments that each alert starts, without a shell. The program inherits the
    environment, and can read secrets there."""
    webhook: str | None = setting(None, resume="harmless", secret=True)
    """URL to which each alert is posted as JSON."""
    first_step: int = setting(100, ge=10, resume="harmless")
    """First step at which a run can be reported as stuck or unstable."""
    timeout_s: float = setting(10.0, gt=0, le=60, resume="harmless")
    """Longest time in seconds of the command, and of a request to the webhook."""


@dataclass
class TrackingConfig:
    progress: str = setting("auto", choices=("auto", "live", "plain"), resume="harmless")
    """`live` bar or `plain` lines; `auto` is `live` if standard error is a terminal (under torchrun: `plain`)."""
    wandb: WandbConfig = setting(WandbConfig, resume="harmless")
    mlflow: MlflowConfig = setting(MlflowConfig, resume="harmless")
    alerts: AlertsConfig = setting(AlertsConfig, resume="harmless")
