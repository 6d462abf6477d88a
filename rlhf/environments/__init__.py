"""Environments: users' classes that answer the policy over several turns. Importing this package is fast.

An environment is a class. `reset(**row)` begins an episode; a string that it returns is appended to the last user
message. Each public method with types and a docstring is a tool. `get_reward()`, sync or async, scores the episode, and
`close()` ends the episode. With `state_dict()` and `load_state_dict()`, a resumed run restores an unfinished
episode without repeating its calls. A class may instead mark one method, `step(text)`, with `free_text`: this method
reads the policy's text, and the class has no tools.
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
