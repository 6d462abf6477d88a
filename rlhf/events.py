"""Events of a run, announced as they happen.

Every part of the trainer says where it is: `announce("rollout.before")`. The worker keeps the newest event as evidence
for the supervisor (which step, which moment), and the fault campaign subscribes to kill the process at an exact one.
With no listener an announcement costs one truth test.
"""

import importlib
import os
from collections.abc import Callable

Listener = Callable[[str], None]
LISTENER_VARIABLE = "RLHF_EVENT_LISTENER"

_listeners: list[Listener] = []


def announce(event: str) -> None:
    """Tell every listener that `event` (dotted, e.g. "commit.rename") happens now, in this process."""
    for listener in _listeners:
        listener(event)


def subscribe(listener: Listener) -> None:
    """Call `listener(event)` at every later announcement of this process."""
    _listeners.append(listener)


def subscribe_from_environment() -> None:
    """Subscribe `module:function` named by RLHF_EVENT_LISTENER, if it is set; that is how tests reach into the
    ranks."""
    if spec := os.environ.get(LISTENER_VARIABLE):
        module, _, name = spec.partition(":")
        subscribe(getattr(importlib.import_module(module), name))
