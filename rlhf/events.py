"""Publishes the events and phases of a process to its listeners.

Every part of the trainer announces events: `announce("rollout.before")`. A rank writes the newest event into its status
file as evidence for the supervisor, and the fault campaign kills processes at events. `report` is for displays of
progress. Without a listener, each call costs one truth test.
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
    """Call every listener with `event`, a dotted name such as "commit.rename", which happens now."""
    for listener in _listeners:
        listener(event)


def report(phase: str, done: int = 0, total: int = 0) -> None:
    """Call every follower with a phase, in words for users, and `done` of `total` parts; 0 parts are not counted."""
    for follower in _followers:
        follower(phase, done, total)


def subscribe(listener: Listener) -> None:
    """Call `listener(event)` at every later announcement of this process."""
    _listeners.append(listener)


def follow(follower: Follower) -> None:
    """Call `follower(phase, done, total)` at every later report of this process."""
    _followers.append(follower)


def subscribe_from_environment() -> None:
    """Subscribe the `module:function` of RLHF_EVENT_LISTENER, by which tests reach into the ranks."""
    if spec := os.environ.get(LISTENER_VARIABLE):
        module, _, name = spec.partition(":")
        subscribe(getattr(importlib.import_module(module), name))
