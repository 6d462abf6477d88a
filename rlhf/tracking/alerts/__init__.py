"""Sends alerts about a run to a command or a webhook, from a process that cannot disturb the training."""

from rlhf.tracking.alerts.alert_sender import check_alerts, has_alerts, sends_alerts
