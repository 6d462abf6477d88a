"""Secrets kept out of what others read: log lines, commands, model cards."""

import re
from collections.abc import Mapping

REDACTED = "REDACTED"
SECRET_NAME = re.compile(r"(.*[_-])?(token|secret|password|passwd|key|credentials?|auth)", re.IGNORECASE)
"""Name of a variable or an option whose value is a secret."""
SECRET = re.compile(r"\b(hf|sk|ghp|gho|xox[a-z]|AKIA)[_-]?[A-Za-z0-9-]{16,}")
"""Text that looks like a secret wherever it stands."""
_LOGIN = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_SHORTEST = 8
"""Characters; a shorter value would be found in words that are no secret."""


class Redaction:
    """Replaces secrets in texts: what looks like one, logins in addresses, and the values of what is named like one in
    `named` (environment variables, options of a store)."""

    def __init__(self, *named: Mapping[str, object]) -> None:
        values = {
            str(value) for names in named for name, value in names.items() if value and SECRET_NAME.fullmatch(str(name))
        }
        # The longest first: one may be the beginning of another.
        self._values = sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """`text` without secrets."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        return _LOGIN.sub(REDACTED, SECRET.sub(REDACTED, text))
