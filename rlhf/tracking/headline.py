"""Headline of evaluations: the one figure that people are shown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_REWARD_IS_MAIN = re.compile(r"val-core/.*/reward/mean@\d+")


@dataclass(frozen=True)
class Headline:
    """A metric with its label, its name in report.json, and how its values are written."""

    metric: str
    label: str
    key: str
    format: str


ACCURACY = Headline("val/accuracy", "held-out accuracy", "accuracy", ".1%")
REWARD = Headline("val/reward", "held-out reward", "val_reward", ".3f")


def headline(record: Mapping[str, float]) -> Headline:
    """The reward where a source of the evaluation has no accuracy, which scores that are not 0 or 1 do not give."""
    return REWARD if any(map(_REWARD_IS_MAIN.fullmatch, record)) else ACCURACY
