"""The refusal of a check, and what a user must find in it, whatever its sentences are."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from rlhf.errors import UserError


def refused(check: Callable[..., Any], *arguments: Any) -> str:
    """The message of the UserError that `check(*arguments)` raises."""
    with pytest.raises(UserError) as refusal:
        check(*arguments)
    return str(refusal.value)


def facts(*texts: str) -> str:
    """The pattern of a message that has all of these, in this order: the setting, its value, what stands against it,
    and the setting of the remedy."""
    return "(?s)" + ".*".join(map(re.escape, texts))


def says(message: object, *texts: str) -> None:
    """The message has all of these, in this order."""
    assert re.search(facts(*texts), str(message)), f"{texts} not in this order in: {message}"
