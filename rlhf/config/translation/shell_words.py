"""Splits a shell script into words and operators, and expands words, without running anything."""

import ast
import operator
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlhf.errors import UserError

UNKNOWN = "\1"
"""Precedes a part of a word that is not known without running the script, such as `$(date)` or `$1`."""
_LONGEST = 100_000
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _nested(opens: str, inner: str, closes: str) -> str:
    """Return a pattern of brackets around `inner` and up to four levels of the same brackets."""
    pattern = f"{opens}(?:{inner})*+{closes}"
    for _ in range(4):
        pattern = f"{opens}(?:{inner}|{pattern})*+{closes}"
    return pattern


_QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*+\""""
_PARENTHESES = _nested(r"\(", rf"{_QUOTED}|[^()\\'\"]", r"\)")
_DOLLAR = rf"\$(?:{_PARENTHESES}|{_nested(r'{', r'[^{}]', '}')}|[A-Za-z_]\w*|[\d@*#?$!-])"
_DOUBLE = rf'"(?:\\.|{_DOLLAR}|`[^`]*`|[^"\\`])*+"'
_PARTS = {
    "escape": r"\\(?:[ \t]*\r?\n|.)",
    "single": r"'[^']*'",
    "double": _DOUBLE,
    "dollar": _DOLLAR,
    "unknown": rf"\$'(?:\\.|[^'\\])*'|\${_DOUBLE}|`[^`]*`|[<>=]{_PARENTHESES}|\{{[^\s{{}}]*,[^\s{{}}]*\}}",
    "plain": r"""[^\s;&|<>()'"`\\$={]+|\$(?![({])|[={]|<[^\s<>]+>""",
}
_PIECE = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PARTS.items()) + "|.", re.DOTALL)
"""Matches a part of a word, or another character of a default such as `${N:-a b}`. `=(...)` is an array, and `<name>` a
placeholder to fill in."""
_IN_DOUBLE = re.compile(rf"\\(?P<escaped>[$`\"\\\n])|{_DOLLAR}|`[^`]*`", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?[-=+?])(.*))?\})", re.DOTALL)
_TOKEN = re.compile(
    rf"""(?P<blank>[^\S\n]+|\\[ \t]*\r?\n|\#[^\n]*)
    |(?P<redirection>&>>?|(?:\d+|\{{\w+\}})?(?!<[^\s<>]+>)(?:<<<|<<-?|<&|<>|>>|>\||>&|[<>](?!\()))
    |(?P<word>\[\[\s.*?\s\]\]|\({_PARENTHESES}\)|(?:{"|".join(_PARTS.values())})++)
    |(?P<end>&&|\|\||;;&|;;|;&|\|&|[;&|\n])|(?P<open>\()|(?P<close>\))""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str
    """`word`, `end` (an operator or line break that ends a command), `open` or `close` (a parenthesis)."""
    text: str
    line: int


def tokens_of(script: str) -> Iterator[Token]:
    """Yield the words and operators of a script, without comments, redirections and here-documents.

    Raises:
        UserError: a quote or bracket is never closed.
    """
    before, at, line, target, documents = 0, 0, 1, "", list[re.Pattern[str]]()
    while at < len(script):
        match, line = _TOKEN.match(script, at), line + script.count("\n", before, at)
        if match is None:
            raise UserError(f"line {line}: a quote or bracket there is never closed. Correct it.")
        before, at, kind, text = at, match.end(), str(match.lastgroup), match[0]
        if kind == "redirection":
            target = text
        elif kind == "word" and target:
            if re.search("(?<!<)<<-?$", target):
                tabs = "\t*" if target.endswith("-") else ""
                word = re.escape(re.sub(r"[\\'\"]", "", text))
                documents.append(re.compile(rf"^{tabs}{word}\r?$", re.MULTILINE))
            target = ""
        elif kind != "blank":
            yield Token(kind, text, line)
        if text == "\n":
            for end in documents:
                found = end.search(script, at)
                at = found.end() if found else len(script)
            documents = []


class Variables:
    """The variables that a script has set so far; None if the value is not known."""

    def __init__(self) -> None:
        self.values: dict[str, str | None] = {}

    def words(self, text: str, *, split: bool = True) -> list[str]:
        """Return the words that a word of the script becomes. `split`: split the values of variables at blanks."""
        found, quoted = [""], False
        for match in _PIECE.finditer(text):
            kind, part = match.lastgroup, match[0]
            quoted |= kind in ("single", "double")
            if kind == "dollar":
                part = self._value(part)
                if split and UNKNOWN not in part:
                    first, *rest = re.split(r"\s+", part)
                    found[-1] += first
                    found += rest
                    continue
            elif kind == "double":
                part = self._in_double(part[1:-1])
            elif kind == "single":
                part = part[1:-1]
            elif kind == "escape":
                part = "" if part.endswith("\n") else part[1:]
            found[-1] += UNKNOWN + part if kind == "unknown" else part
        if sum(map(len, found)) > _LONGEST:
            raise UserError(f"a word has over {_LONGEST} characters after its variables are replaced. Shorten it.")
        return [word for word in found if word] or [""] * quoted

    def text(self, text: str) -> str:
        """Return the value that a variable gets from a word of the script."""
        return "".join(self.words(text, split=False))

    def _in_double(self, text: str) -> str:
        def replaced(match: re.Match[str]) -> str:
            if (escaped := match["escaped"]) is not None:
                return escaped.strip("\n")
            return self._value(match[0]) if match[0][0] == "$" else UNKNOWN + match[0]

        return _IN_DOUBLE.sub(replaced, text)

    def _value(self, text: str) -> str:
        """Return the value of `$NAME`, `${NAME:-default}` or `$((...))`; of another variable of the environment, an
        interpolation."""
        if text.startswith("$((") and text.endswith("))"):
            total = self._total(text[3:-2])
            return UNKNOWN + text if total is None else str(total)
        match = _VARIABLE.fullmatch(text)
        name = (match[1] or match[2]) if match else ""
        if match is None or self.values.get(name, "") is None:
            return UNKNOWN + text
        value, kind, word = self.values.get(name), match[3] or "?", match[4] or ""
        absent = value is None or (value == "" and kind[0] == ":")
        if kind[-1] == "+":
            return UNKNOWN + text if value is None else "" if absent else self.text(word)
        if kind[-1] == "?" or not absent:
            return f"${{oc.env:{name}}}" if value is None else value
        default = self.text(word)
        if kind[-1] == "=":
            self.values[name] = default
        return default

    def _total(self, text: str) -> int | None:
        """Return the value of an expression of integers, or None."""

        def replaced(match: re.Match[str]) -> str:
            value = self.values.get(match[0])
            return match[0] if value is None else f"({value})"

        names = re.sub(r"(?<![\w$])[A-Za-z_]\w*", replaced, self._in_double(text))
        try:
            return None if "#" in names else _evaluated(ast.parse(names.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Div | ast.Mod) and min(left, right) < 0:
            raise ValueError("Python rounds down, and the shell towards 0")
        total: Any = _OPERATORS[type(node.op)](left, right)
        return int(total)
    raise ValueError("not an expression of integers")
