"""Reads the commands of a shell script, without running anything."""

import ast
import operator
import re
import shlex
from collections.abc import Collection, Mapping
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
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BRANCHES = re.compile(r"^(?:(?:then|do|else)(?:\s+|$))+")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")


_CONTINUED = re.compile(r"\\[ \t]*\r?\n")
_TOKEN = re.compile(
    r"""
    (?P<kept> \\[ \t]*\r?\n | \\. | '[^']*' | "(?:\\.|[^"\\])*" | `[^`]*`
        | \$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\) | \$\{(?:[^{}]|\$?\{[^{}]*\})*\} )
    | (?P<comment> (?<![^\s;|&(])\#[^\n]* )
    | (?P<redirection> (?:&>>? | (?<![^\s;|&(])\d*(?!<[^\s<>]+>)(?:<<<|<<-?|<|>>|>\||>)&?)
        [ \t]*(?:[<>]?\([^()\n]*\)|'[^']*'|"[^"]*"|[^\s|;&]*) )
    | (?P<end> && | \|\| | [|;&\n] )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Matches the tokens that decide where a command ends. `<name>` is not a redirection but a placeholder to fill in."""


def commands_of(script: str) -> list[list[str]]:
    """Return the words of each command of a script, without comments, redirections, `$@` and `$*`.

    A command ends at `|`, `;`, `&` (so also at `&&` and `||`), or at the end of its line; `\\` continues a line.
    Assignments are not commands.
    Variables that the script sets, their defaults (`${N:-8}`) and arithmetic with integers (`$((2 * N))`) are replaced
    by their values.
    Other variables become interpolations of the environment: `$HOME/data` is `${oc.env:HOME}/data`. So do variables
    that the script sets only under a condition or in a loop, because their values are not known; a word that is only
    such a variable is returned as `$NAME`.
    """
    values: dict[str, str] = {}
    unknown: set[str] = set()
    commands: list[list[str]] = []
    depth, always = 0, True
    for line in _TOKEN.sub(_marked, script).split("\0"):
        conditional = line.startswith("\2") and not always  # an assignment before `&&` always succeeds
        line = _BRANCHES.sub("", line.lstrip("\2").strip(), count=1)
        first = line.partition(" ")[0]
        depth += (first in _OPENS) - (first in _CLOSES)
        if loop := re.match(r"(?:for|select)\s+(\w+)", line):
            values.pop(loop[1], None)
        assigned = _ASSIGNMENT.fullmatch(line)
        found = _split(_replaced(line, values))
        always = bool(assigned and len(found) <= 1 + line.startswith("export"))
        if assigned and always:
            name, appends, text = assigned.groups()
            if conditional or depth > 0 or (appends and name in unknown):
                values.pop(name, None)
                unknown.add(name)
                continue
            unknown.discard(name)
            before = values.get(name, "") if appends else ""
            values[name] = before + " ".join(_split(_replaced(text, values)))
        elif words := [word for word in found if word not in ("$@", "${@}", "$*", "\\")]:
            commands.append([_visible(word, unknown) for word in words])
    return commands


def _visible(word: str, unknown: Collection[str]) -> str:
    """Return the word with interpolations of the environment. A word that is only an `unknown` variable is returned as
    `$NAME`, because it may be several words."""
    whole = re.fullmatch("\0(.*?)\1", word)
    return f"${whole[1]}" if whole and whole[1] in unknown else re.sub("\0(.*?)\1", r"${oc.env:\1}", word)


def _marked(token: re.Match[str]) -> str:
    """Return the replacement of `token`: NUL ends a command, a space replaces a comment or redirection. After `&&` and
    `||`, a second mark follows."""
    if token["kept"]:
        return _CONTINUED.sub(" ", token["kept"])
    return ("\0\2" if token["end"] in ("&&", "||") else "\0") if token["end"] else " "


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is never closed
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
    return f"\0{name}\1"  # `commands_of` adds the braces later: here they would end an outer ${X:-...}


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
