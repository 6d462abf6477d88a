"""Reads the commands of a shell script, without running anything."""

import ast
import operator
import re
import shlex
from collections.abc import Iterable, Mapping
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
_DECLARES = r"(?:(?:export|readonly|declare|local|typeset)(?:\s+-\w+)*\s+)?"
_ASSIGNMENT = re.compile(rf"{_DECLARES}([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BRANCH = re.compile(r"(then|do|else|elif|\{|[\w-]+\s*\(\)\s*\{?)(?:\s+|$)")
_PATTERN = re.compile(r"\(?[^()$=\s]+(?:\s*\|\s*[^()$=\s]+)*\)\s*")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac", "}")
_SETTERS = ("read", "let", "mapfile", "readarray", "unset", "getopts", "printf")
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
    Other variables become interpolations of the environment: `$HOME/data` is `${oc.env:HOME}/data`. A variable whose
    value is not known without running the script, such as one set under a condition, stays: `$NAME`.
    """
    reader = _Reader()
    for line in _TOKEN.sub(_marked, script).split("\0"):
        reader.read(line)
    return reader.commands


class _Reader:
    """Reads a script line by line. A value that a block sets is known until the block, or its branch, ends."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self._values: dict[str, str] = {}
        self._unknown: set[str] = set()
        self._depth = 0  # number of open blocks
        self._depth_of: dict[str, int] = {}  # by variable that a block has set
        self._always = True  # whether the last line always succeeds

    def read(self, line: str) -> None:
        """Read a line with the marks of `_marked`."""
        conditional = line.startswith("\3") or (line.startswith("\2") and not self._always)
        line = self._without_branches(line.lstrip("\2\3").strip())
        first = next(iter(line.split()), "")
        if first in _CLOSES:
            self._forget(self._depth)
            self._depth -= 1
        self._depth += first in _OPENS
        if loop := re.match(r"(?:for|select)\s+(\w+)", line):
            self._lose({loop[1]})
        assigned = _ASSIGNMENT.fullmatch(line)
        words = _split(self._replaced(line[assigned.start(1) :] if assigned else line))
        self._always = bool(assigned) and all(re.match(r"[A-Za-z_]\w*\+?=", word) for word in words)
        if assigned and len(words) <= 1:
            self._assign(*assigned.groups(), conditional=conditional)
        elif self._always and not conditional:
            for word in words:
                name, _, value = word.partition("=")
                self._assign(name.removesuffix("+"), "+" * name.endswith("+"), shlex.quote(value), conditional=False)
        else:
            if words := [word for word in words if word not in ("$@", "${@}", "$*", "\\")]:
                self.commands.append([re.sub("\0(.*?)\1", r"${oc.env:\1}", word) for word in words])
            sets = r"[A-Za-z_]\w*" if first in _SETTERS or "((" in line else r"(?:^|(?<=[\s({;]))[A-Za-z_]\w*(?=\+?=)"
            self._lose(re.findall(sets, line))

    def _without_branches(self, line: str) -> str:
        """Return the line without keywords, braces and patterns that begin a branch or a block."""
        while True:
            if found := _BRANCH.match(line):
                if found[1] in ("else", "elif"):
                    self._forget(self._depth)
                self._depth += found[1].endswith("{")
            elif self._depth and (found := _PATTERN.match(line)):
                self._forget(self._depth)
            else:
                return line
            line = line[found.end() :]

    def _assign(self, name: str, appends: str, text: str, *, conditional: bool) -> None:
        if conditional or (appends and name in self._unknown):
            self._lose({name})
            return
        before = self._values.get(name, "") if appends else ""
        self._values[name] = before + " ".join(_split(self._replaced(text)))
        self._unknown.discard(name)
        if self._depth > 0:
            self._depth_of[name] = self._depth
        else:
            self._depth_of.pop(name, None)

    def _forget(self, depth: int) -> None:
        """Lose the values of variables that were set in blocks at this depth or deeper."""
        self._lose([name for name, of_name in self._depth_of.items() if of_name >= depth])

    def _lose(self, names: Iterable[str]) -> None:
        for name in names:
            self._values.pop(name, None)
            self._depth_of.pop(name, None)
            self._unknown.add(name)

    def _replaced(self, text: str) -> str:
        return _replaced(text, self._values | {name: f"${name}" for name in self._unknown})


def _marked(token: re.Match[str]) -> str:
    """Return the replacement of `token`: NUL ends a command, a space replaces a comment or redirection. A second mark
    follows after `&&` (\\2) and `||` (\\3)."""
    if token["kept"]:
        return _CONTINUED.sub(" ", token["kept"])
    return "\0" + {"&&": "\2", "||": "\3"}.get(token["end"], "") if token["end"] else " "


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
