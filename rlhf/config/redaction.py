"""Redacts secrets in published text: log lines, commands, model cards."""

import re
from collections.abc import Mapping

REDACTED = "REDACTED"
SECRET_NAME = re.compile(
    r"(.*[_-])?(api|access|auth|private|secret)?"
    r"(token|secrets?|passwords?|passwd|bearer|passphrase|keys?|credentials?|auth|authorization|cookie)"
    r"|.+[_-]pwd",  # $PWD is the working directory
    re.IGNORECASE,
)
"""Name of a variable or an option whose value is a secret."""
SECRET = re.compile(r"\b(hf|sk|ghp|gho|xox[a-z]|AKIA)[_-]?[A-Za-z0-9-]{16,}")
"""Tokens in the formats of Hugging Face, OpenAI, GitHub, Slack and AWS, wherever they occur in a text."""
LOGIN = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_QUERY = re.compile(r"(?<=://)([^\s?]*\?)[^\s'\"`)>\]},;]+")
_SHORTEST = 8
"""Redact only values of at least this many characters: shorter values may occur inside ordinary words."""


class Redaction:
    """Replaces secrets in texts: text that looks like a secret, logins and queries in URLs, and values of secret names
    in `named` (e.g. environment variables)."""

    def __init__(self, *named: Mapping[str, object]) -> None:
        values = {
            str(value) for names in named for name, value in names.items() if value and SECRET_NAME.fullmatch(str(name))
        }
        # Replace the longest value first, because a value may start with another value.
        self._values = sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, REDACTED)
        return without_queries(SECRET.sub(REDACTED, text))


def without_queries(text: str) -> str:
    """Return `text` without the logins and queries of addresses."""
    return _QUERY.sub(rf"\1{REDACTED}", LOGIN.sub(REDACTED, text))
