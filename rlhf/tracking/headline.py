"""Chooses the metric of an evaluation that progress lines and reports show."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_REWARD_IS_MAIN = re.compile(r"val-core/.*/reward/mean@\d+")


@dataclass(frozen=True)
class Headline:
    """A metric with its label, its name in report.json, and the format of its values."""

    metric: str
    label: str
    key: str
    format: str


ACCURACY = Headline("val/accuracy", "held-out accuracy", "accuracy", ".1%")
REWARD = Headline("val/reward", "held-out reward", "val_reward", ".3f")


def headline(record: Mapping[str, float]) -> Headline:
    """Return REWARD if a data source has no accuracy because its scores are not only 0 and 1, else ACCURACY."""
    return REWARD if any(map(_REWARD_IS_MAIN.fullmatch, record)) else ACCURACY


def headline_of(report: Mapping[str, Any]) -> Headline:
    """Return the headline of a report (`tracking.report`)."""
    return REWARD if report["headline"] == REWARD.metric else ACCURACY
