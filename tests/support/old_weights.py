"""Makes the embedded engine keep its old weights at one weight sync of a run (RLHF_EVENT_LISTENER)."""

import os
from pathlib import Path
from unittest import mock

from rlhf.events import LISTENER_VARIABLE
from rlhf.rollout import Weights
from rlhf.rollout.embedded import EmbeddedEngine

MARKER_VARIABLE = "RLHF_TEST_OLD_WEIGHTS"
VERSION = 5
"""Policy version whose weights the engine does not receive."""

_update_weights = EmbeddedEngine.update_weights


def environment(marker: Path) -> dict[str, str]:
    """Return the variables of a start whose engine keeps old weights once and then creates `marker`."""
    return {MARKER_VARIABLE: str(marker), LISTENER_VARIABLE: f"{__name__}:on_event"}


def on_event(event: str) -> None:
    """Replace the engine's method by `_keeping` before the first weight sync."""
    EmbeddedEngine.update_weights = _keeping


def _keeping(engine: EmbeddedEngine, weights: Weights, version: int) -> None:
    marker = Path(os.environ[MARKER_VARIABLE])
    if version != VERSION or marker.exists():
        _update_weights(engine, weights, version)
        return
    marker.touch()
    own = engine.model.state_dict(keep_vars=True)
    copies = {id(weight): weight.clone() for weight in own.values()}
    elsewhere = {name: copies[id(weight)] for name, weight in own.items()}
    with mock.patch.object(engine.model, "state_dict", return_value=elsewhere):
        _update_weights(engine, weights, version)
