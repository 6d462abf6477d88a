"""Checks the facts in error messages, independent of their sentences."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from rlhf.errors import UserError


def user_error(check: Callable[..., Any], *arguments: Any) -> str:
    """Return the message of the UserError that `check(*arguments)` raises."""
    with pytest.raises(UserError) as raised:
        check(*arguments)
    return str(raised.value)


def facts(*texts: str) -> str:
    """Return the pattern of a message with all `texts` in order: setting, value, conflict, and the remedy's setting."""
    return "(?s)" + ".*".join(map(re.escape, texts))


def says(message: object, *texts: str) -> None:
    """Check that the message has all `texts` in order."""
    assert re.search(facts(*texts), str(message)), f"{texts} not in this order in: {message}"
