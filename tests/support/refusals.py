"""The refusal of a check, as a user reads it."""

from collections.abc import Callable
from typing import Any

import pytest

from rlhf.errors import UserError


def refused(check: Callable[..., Any], *arguments: Any) -> str:
    """The message of the UserError that `check(*arguments)` raises."""
    with pytest.raises(UserError) as refusal:
        check(*arguments)
    return str(refusal.value)
