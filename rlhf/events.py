"""Publishes the events and phases of a process to its listeners.

Every part of the trainer announces events: `announce("rollout.before")`. A rank writes the newest event into its status
file, which the supervisor reads. The tests in `tests/faults` kill processes at events. `report` publishes phases for
progress displays. A call without listeners does nothing.
"""

import importlib
import os
from collections.abc import Callable

Listener = Callable[[str], None]
Follower = Callable[[str, int, int], None]
GENERATING, REWARD = "generating", "reward"
"""Phases whose progress counts responses."""
LISTENER_VARIABLE = "RLHF_EVENT_LISTENER"

_listeners: list[Listener] = []
_followers: list[Follower] = []


def announce(event: str) -> None:
    """Call every listener with `event`, a dotted name such as "commit.rename"."""
    for listener in _listeners:
        listener(event)


def report(phase: str, done: int = 0, total: int = 0) -> None:
    """Call every follower with a phase, in words for users, and its progress, `done` of `total` (0: no count)."""
    for follower in _followers:
        follower(phase, done, total)


def subscribe(listener: Listener) -> None:
    """Call `listener(event)` at every later announcement of this process."""
    _listeners.append(listener)


def follow(follower: Follower) -> None:
    """Call `follower(phase, done, total)` at every later report of this process."""
    _followers.append(follower)


def subscribe_from_environment() -> None:
    """Subscribe the `module:function` in RLHF_EVENT_LISTENER, so that tests can run code inside the ranks."""
    if spec := os.environ.get(LISTENER_VARIABLE):
        module, _, name = spec.partition(":")
        subscribe(getattr(importlib.import_module(module), name))
