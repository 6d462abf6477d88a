"""Events and phases of a run, told as they happen.

Every part of the trainer says where it is: `announce("rollout.before")`. The worker keeps the newest event as evidence
for the supervisor (which step, which moment), and the fault campaign subscribes to kill the process at an exact one.
What a person may want to watch meanwhile is told by `report`. With no listener either costs one truth test.
"""

import importlib
import os
from collections.abc import Callable

Listener = Callable[[str], None]
Follower = Callable[[str, int, int], None]
GENERATING, REWARD = "generating", "reward"
"""Phases whose parts are responses."""
LISTENER_VARIABLE = "RLHF_EVENT_LISTENER"

_listeners: list[Listener] = []
_followers: list[Follower] = []


def announce(event: str) -> None:
    """Tell every listener that `event` (dotted, e.g. "commit.rename") happens now, in this process."""
    for listener in _listeners:
        listener(event)


def report(phase: str, done: int = 0, total: int = 0) -> None:
    """Tell every follower that this process is in `phase`, in words for people, and has `done` of `total` parts of it;
    with a `total` of 0 they are not counted."""
    for follower in _followers:
        follower(phase, done, total)


def subscribe(listener: Listener) -> None:
    """Call `listener(event)` at every later announcement of this process."""
    _listeners.append(listener)


def follow(follower: Follower) -> None:
    """Call `follower(phase, done, total)` at every later report of this process."""
    _followers.append(follower)


def subscribe_from_environment() -> None:
    """Subscribe `module:function` named by RLHF_EVENT_LISTENER, if it is set; that is how tests reach into the
    ranks."""
    if spec := os.environ.get(LISTENER_VARIABLE):
        module, _, name = spec.partition(":")
        subscribe(getattr(importlib.import_module(module), name))
