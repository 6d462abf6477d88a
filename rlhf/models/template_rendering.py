"""Renders one prompt by a chat template in a separate process, with limits of time and memory.

`python -m rlhf.models.template_rendering` reads template, messages and variables as JSON from stdin. It writes nothing
to stdout if the template works, otherwise the problem.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from rlhf.ranks.parent import PARENT_PID, die_with_parent

DEADLINE_S = 60.0  # limit in seconds for rendering one prompt
MEMORY_LIMIT_BYTES = 2 << 30  # limit of the process's memory, with the interpreter
_STDERR_CHARS = 2000


def rendering_problem(template: str, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str | None:
    """Return None if the template renders the messages; otherwise the end of a sentence with the reason and a remedy.

    The caller begins the sentence with "the chat template", and adds the second remedy: another template.
    """
    request = json.dumps([template, [dict(message) for message in messages], dict(variables)])
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            env=os.environ | {PARENT_PID: str(os.getpid()), "OPENBLAS_NUM_THREADS": "1"},
            input=request.encode(),
            capture_output=True,
            timeout=DEADLINE_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"did not render the prompt within {DEADLINE_S:g} s. Correct its loops"
    if done.returncode:
        words = done.stderr.decode(errors="replace")[-_STDERR_CHARS:].strip()
        return f"crashed the process that renders the prompt (exit code {done.returncode}; {words}). Correct it"
    return done.stdout.decode() or None


def environment() -> Any:
    """Return a Jinja environment with nearly the syntax and functions of transformers' templates."""
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """transformers' tag around the assistant's turns."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    made.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


def main() -> None:
    die_with_parent()  # a template's loop may never end
    template, messages, variables = json.load(sys.stdin)
    with suppress(ValueError, OSError):  # the user may have set a lower limit
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    problem = _problem(template, messages, variables)
    sys.stdout.buffer.write(problem.encode(errors="backslashreplace"))


def _problem(template: str, messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
    try:
        environment().from_string(template).render(messages=messages, add_generation_prompt=True, **variables)
    except MemoryError:
        return f"needs more than {MEMORY_LIMIT_BYTES >> 30} GiB of memory for the prompt. Correct it"
    except Exception:  # templates raise anything; check with transformers' slower renderer, which the ranks use
        return _problem_of_transformers(template, messages, variables)
    return ""


def _problem_of_transformers(template: str, messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
    """Render with transformers, as the ranks do. The import takes a second, but does not import torch."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **variables)
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages)
        return f"rejects the prompt (roles: {roles}): {_describe(error)}. Correct the prompt"
    return ""


def _describe(error: Exception) -> str:
    import jinja2

    text = str(error).rstrip(".")
    return text if type(error) is jinja2.TemplateError else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
