"""Redacts secrets in published text: log lines, commands, model cards."""

import re
from collections.abc import Mapping

REDACTED = "REDACTED"
SECRET_NAME = re.compile(
    r"(.*[_-])?(api|access|auth|private|secret)?"
    r"(tokens?|secrets?|passwords?|passwd|bearer|passphrase|keys?|cred(ential)?s?|(auth|authorization)([_-]?headers?)?"
    r"|cookie|jwts?)([_-]?\d+)?"
    r"|.+[_-]pwd?([_-]?\d+)?",  # not `pwd` alone: $PWD is the working directory
    re.IGNORECASE,
)
"""Matches the name of an environment variable whose value is a secret. See also `names_secret`."""
SECRET_KEY = re.compile(rf"{SECRET_NAME.pattern}|pwd?([_-]?\d+)?|sk|(.+[_-])?pat", re.IGNORECASE)
"""Matches the key of a mapping, or the name of an option, whose value is a secret."""
_WORD_OF_CAMEL_CASE = re.compile(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NUMBER = re.compile(r"[-+]?[\d.]+([eE][-+]?\d+)?|None|True|False")
_COUNTED = re.compile(r"(.*[_-])?tokens([_-]?\d+)?", re.IGNORECASE)
_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z/]+\]")
"""A special token, such as `</think>`."""
_COLUMN = re.compile(
    r"(?!.*(api|access|auth|private|secret|encryption|signing|master)[_-]?key)(?-i:(?![A-Z\d_-]+\Z))"
    r"(.*[_-])?keys?([_-]?\d+)?",
    re.IGNORECASE,
)
"""Matches a name such as `answer_key`, which may name a column of the data, but not `api_key`, `JUDGE_KEY` or similar
names."""
_WORDS = re.compile(r"[A-Za-z]{1,15}\d{0,2}([_.][A-Za-z]{0,15}\d{0,2}){0,3}")
"""Matches a value that may name a column of the data. Longer words may be generated keys."""
SECRET = re.compile(
    r"\b(?:sk-|github_pat_|glpat-|AIza)[\w-]{16,}"
    r"|\b(?:hf|sk|gh[pousr]|xox[a-z]|AKIA)[_-]?[A-Za-z0-9-]{16,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+"
    r"|\bBearer +[^\s'\",]+"
    r"|\b(?i:authorization)['\"]?\s*[:=]\s*['\"]?(?:\w+ +)?[^\s'\",]+"
)
"""Tokens of Hugging Face, OpenAI, Anthropic, GitHub, GitLab, Google, Slack and AWS, JSON web tokens, Slack's webhooks
and HTTP's authorization, anywhere in a text."""
LOGIN = re.compile(
    r"(?<=://)(?:(?!git@)(?<!hdfs://)(?<!abfs://)(?<!abfss://)[^/\s?#'\",]*[^/\s?#:'\",]|[^/\s:@'\",]*:[^/\s@'\",]+)(?=@)"
)
"""Matches the login of a URL. It may be a token alone, except for git's SSH user, HDFS users and Azure's containers."""
_QUERY = re.compile(r"(?<=://)([^\s?]*\?)[^\s'\"`)>\]},;]+")
_VARIABLE = re.compile(r"(?:(?:basic|bearer|token) +)?\$\{oc\.env:\s*\w+\s*\}", re.IGNORECASE)
_SHORTEST = 8
"""Redact only values of at least this many characters: shorter values may occur inside ordinary words."""


class Redaction:
    """Replaces secrets in texts: text that looks like a secret, logins and queries in URLs, and values of secret names
    in `named` (e.g. environment variables)."""

    def __init__(self, *named: Mapping[str, object]) -> None:
        values = {
            str(value)
            for names in named
            for name, value in names.items()
            if value and has_secret(str(name), value, SECRET_NAME)
        }
        # Replace the longest value first, because a value may start with another value.
        self._values = sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, REDACTED)
        return without_queries(SECRET.sub(REDACTED, text))


def names_secret(name: str, names: re.Pattern[str] = SECRET_KEY) -> bool:
    """Return whether `names` matches `name`, of which `openaiApiKey` is read as `openai_Api_Key`."""
    return names.fullmatch(_with_words(name)) is not None


def _with_words(name: str) -> str:
    return _WORD_OF_CAMEL_CASE.sub("_", name)


def has_secret(name: str, value: object, names: re.Pattern[str] = SECRET_KEY) -> bool:
    """Return whether `value` under `name` is a secret.

    A number under a name such as `max_tokens` is no secret. In mappings (`names` is SECRET_KEY), special tokens and the
    names of columns are not secrets: a resume does not compare secrets, so it would miss a changed `answer_key`.
    """
    name = _with_words(name)
    if not names.fullmatch(name) or (_COUNTED.fullmatch(name) and _has_only(_NUMBER, value)):
        return False
    return names is not SECRET_KEY or not (
        _has_only(_MARKER, value) or (_COLUMN.fullmatch(name) and _has_only(_WORDS, value))
    )


def _has_only(pattern: re.Pattern[str], value: object) -> bool:
    """Return whether `pattern` matches the text of `value`, or of each value in a container."""
    if isinstance(value, dict | list):
        return all(_has_only(pattern, item) for item in (value.values() if isinstance(value, dict) else value))
    return pattern.fullmatch(str(value)) is not None


def without_variables(text: str) -> str:
    """Return `text` without references to environment variables (`Bearer ${oc.env:TOKEN}`), which contain no secret."""
    return _VARIABLE.sub("", text)


def without_queries(text: str) -> str:
    """Return `text` with the logins and queries of URLs redacted."""
    return _QUERY.sub(rf"\1{REDACTED}", LOGIN.sub(REDACTED, text))
