"""Reads the arguments of a command in a shell script, without running anything."""

import ast
import operator
import re
import shlex
from collections.abc import Mapping
from typing import Any

from rlhf.errors import UserError

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LONGEST = 100_000
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")


def words_of(script: str) -> list[str]:
    """Return the words of a script's lines, without assignments, comments, `$@` and `$*`.

    Variables that the script sets, their defaults (`${N:-8}`) and arithmetic with integers (`$((2 * N))`) are replaced
    by their values.
    Other variables become interpolations of the environment: `$HOME/data` is `${oc.env:HOME}/data`.
    """
    values: dict[str, str] = {}
    words: list[str] = []
    joined = re.sub(r"\\[ \t]*\r?\n", " ", script)
    for line in joined.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        assigned = _ASSIGNMENT.fullmatch(line)
        found = _split(_replaced(line, values))
        if assigned and len(found) <= 1 + line.startswith("export"):
            values[assigned[1]] = " ".join(_split(_replaced(assigned[2], values)))
        else:
            words += [word for word in found if word not in ("$@", "${@}", "$*", "\\")]
    return [re.sub("\0(.*?)\1", r"${oc.env:\1}", word) for word in words]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # an open quote begins a text of several lines, which no argument needs
        return text.split()


def _replaced(text: str, values: Mapping[str, str]) -> str:
    """Replace the variables and `$((...))` in `text`, from the inside out."""
    for _ in range(20):
        if len(text) > _LONGEST:
            raise UserError(f"a line has over {_LONGEST} characters after its variables are replaced. Shorten it.")
        new = _SUM.sub(lambda match: _total(match[1], values), text)
        new = _VARIABLE.sub(lambda match: _value(match, values), new)
        if new == text:
            break
        text = new
    return text


def _value(match: re.Match[str], values: Mapping[str, str]) -> str:
    name, default = match[1] or match[3], match[2]
    if name in values:
        return values[name]
    if default is not None:
        return default.strip("\"'")
    return f"\0{name}\1"  # `words_of` adds the braces later: here they would end an outer ${X:-...}


def _total(text: str, values: Mapping[str, str]) -> str:
    """Return the value of an expression of integers; keep any other expression, in parentheses."""
    names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: values.get(match[1], match[1]), text)
    try:
        return str(_evaluated(ast.parse(names.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return f"({text})"


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        total: Any = _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        return int(total)
    raise ValueError("not an expression of integers")
