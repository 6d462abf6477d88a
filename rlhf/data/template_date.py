"""Makes chat templates print the day on which the run started, so that a later resume has the same prompts."""

import json
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any

CALL = "strftime_now"
"""transformers' function for templates that prints the present date, as in Llama 3's templates."""
_CODES = "aAbBcCdDeFfgGhHIjklmMnpPrRStTuUVwWxXyYzZ"
_PERCENT = "\0"


def uses_date(template: Any) -> bool:
    """Return whether `template` may print a date. `template` is a text, or a mapping from names to texts."""
    return CALL in json.dumps(template)


def with_date(template: str, day: date, variables: Mapping[str, Any]) -> str:
    """Return `template` with a first line that defines `strftime_now` as a macro, which prints midnight of `day`.

    transformers passes only plain data from its caller to a template, so the date must be part of the template.
    """
    midnight = datetime.combine(day, time())
    text = template + json.dumps(dict(variables), default=str)
    codes = [f"%{flag}{code}" for code in _CODES for flag in ("", "-") if f"%{flag}{code}" in text]
    pairs = [("%%", _PERCENT), *((code, midnight.strftime(code)) for code in codes), (_PERCENT, "%")]
    filters = "".join(f"|replace({json.dumps(old)}, {json.dumps(new)})" for old, new in pairs)
    return f"{{% macro {CALL}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"
