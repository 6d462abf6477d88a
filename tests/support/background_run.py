"""Replaces a run's engine by the embedded engine in a thread, and interrupts the run (RLHF_EVENT_LISTENER)."""

import os
from typing import Any

import rlhf.assemble.run
from rlhf.events import LISTENER_VARIABLE
from rlhf.rollout.embedded import build_embedded_engine
from tests.support import interrupter
from tests.support.background_engine import BackgroundThread


def at(event: str = "", number: int = 0, what: str = "", **more: Any) -> dict[str, str]:
    """Return `interrupter.at` for a run with a background engine, by default without interruption."""
    return interrupter.at(event, number, what, **more) | {LISTENER_VARIABLE: f"{__name__}:on_event"}


def on_event(event: str) -> None:
    """Install the engine, and interrupt at the planned event."""
    interrupter.on_event(event)


def _engine(setup: Any, policy: Any, model: Any) -> BackgroundThread:
    return BackgroundThread(build_embedded_engine(model, policy.tokenizer, setup.config.rollout, setup.device))


if "RANK" in os.environ:
    rlhf.assemble.run.build_engine = _engine  # type: ignore[assignment]
