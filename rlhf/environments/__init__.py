"""Environments: the user's classes with which the policy talks over several turns. Importing this package is cheap.

An environment is a class. `reset(**row)` begins an episode; a string that it returns is appended to the last user
message. Each public method with types and a docstring is a tool. `get_reward()`, sync or async, scores the episode, and
`close()` ends it. `state_dict()` and `load_state_dict()` let a resume go on inside an episode. An environment whose
method `step(text)` has the decorator `free_text` reads the policy's text instead of tool calls.
"""

from collections.abc import Callable
from typing import Any, TypeVar

FREE_TEXT = "__rlhf_free_text__"
"""Attribute of a method that `free_text` marks."""

Method = TypeVar("Method", bound=Callable[..., Any])


def free_text(method: Method) -> Method:
    """Mark the method that reads the policy's text of each turn.

    The method returns the text of the next user message, or None if the episode is over. A pair `(text, reward)` adds a
    reward for the turn.
    """
    setattr(method, FREE_TEXT, True)
    return method
