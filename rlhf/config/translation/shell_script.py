"""Reads the commands of a shell script, without running anything."""

import re
from collections.abc import Iterable

from rlhf.config.translation.shell_words import UNKNOWN, Token, Variables, tokens_of
from rlhf.errors import UserError

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[.*?\])?(\+?)=(.*)", re.DOTALL)
_DECLARES = ("export", "readonly", "declare", "local", "typeset")
_SETTERS = ("read", "let", "mapfile", "readarray", "unset", "getopts", "printf")
_SOURCES = ("source", ".", "eval")
_ENVIRONMENTS = re.compile(r"activate\b|(rc|profile|conda\.sh)\b|\bconda\b.*\bhook\b")
"""Matches files and commands that prepare a shell. They set no variables of a training script."""
_OPENS, _CLOSES = ("if", "while", "until", "{"), ("fi", "done", "esac", "}")
_BRANCHES, _SKIPPED = ("else", "elif"), ("then", "do", "!", "time")
_HEADS = ("for", "select", "case")


def commands_of(script: str) -> list[list[str]]:
    """Return the words of each command of a script, without comments, redirections, `$@` and `$*`.

    Assignments are not commands. Variables that the script sets, their defaults (`${N:-8}`) and arithmetic with
    integers (`$((2 * N))`) are replaced by their values. Other variables become interpolations of the environment:
    `$HOME/data` is `${oc.env:HOME}/data`. `UNKNOWN` precedes what is not known without running the script, such as
    `$(date)`, `$1`, or a variable that was set under a condition.

    Raises:
        UserError: the script has a construct that this function does not know.
    """
    reader = _Reader()
    for token in tokens_of(f"{script}\n"):
        reader.read(token)
    return reader.commands


class _Reader:
    """Reads a script by tokens. A value that a block sets is known until the block, or its branch, ends."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self._variables = Variables()
        self._words: list[str] = []  # of the command that has begun
        self._before = ""  # the operator before this command
        self._always = False  # whether the last command always succeeds
        self._depth = 0  # number of open blocks
        self._depth_of: dict[str, int] = {}  # by variable that a block has set
        self._in_pattern = False  # before the `)` of a branch of `case`
        self._in_head = False  # between the parentheses of `name()`

    def read(self, token: Token) -> None:
        kind, text, line = token
        if self._in_pattern or self._in_head:
            if text == "esac":
                self._close()
            if text == "esac" or kind == "close":
                self._in_pattern = self._in_head = False
        elif kind == "end":
            self._end(text)
        elif kind == "open":
            if self._words and not re.fullmatch(r"[\w.:-]+", " ".join(self._words)):
                raise UserError(f"line {line}: a `(` is not read there. Write the command without it.")
            self._in_head = bool(self._words)
            self._depth += not self._in_head
            self._words = []
        elif kind == "close":
            self._end(text)
            self._close()
        elif self._words or not self._keyword(text):
            self._words.append(text)
            if self._words[0] == "case" and text == "in":
                self._words, self._in_pattern = [], True
            elif self._words[0] == "function" and len(self._words) == 2:
                self._words = []

    def _keyword(self, word: str) -> bool:
        """Return whether the first word of a command is a keyword that another command may follow."""
        if word in _CLOSES:
            self._close()
        elif word in _BRANCHES:
            self._forget()
        self._depth += word in _OPENS or word in _HEADS
        return word in (*_OPENS, *_CLOSES, *_BRANCHES, *_SKIPPED)

    def _close(self) -> None:
        self._forget()
        self._depth -= 1

    def _end(self, operator: str) -> None:
        if self._words:
            words, self._words = self._words, []
            conditional = self._before == "||" or (self._before == "&&" and not self._always)
            self._always = self._run(words, conditional or {self._before, operator} & {"|", "|&", "&"} != set())
            self._before = operator
        elif operator != "\n":
            self._always, self._before = False, operator
        if operator in (";;", ";&", ";;&"):
            self._forget()
            self._in_pattern = True

    def _run(self, words: list[str], conditional: bool) -> bool:
        """Read a command. Return whether it only assigns values, and so succeeds."""
        first = words[0]
        if first in ("for", "select") or first.startswith("(("):
            self._lose(_NAME.findall(" ".join(words[:2])))
            return False
        options = [word for word in words if re.match("[-+]", word)] if first in _DECLARES else []
        rest = words[1 + len(options) :] if first in _DECLARES else words
        count = next((at for at, word in enumerate(rest) if not _ASSIGNMENT.fullmatch(word)), len(rest))
        if first in _DECLARES or count == len(rest):
            for word in rest:
                if (found := _ASSIGNMENT.fullmatch(word)) is not None:
                    self._assign(*found.groups(), known=not conditional and not re.search("[aAilnu]", "".join(options)))
                elif UNKNOWN in self._variables.text(word):  # export $(cat FILE)
                    self._lose(self._variables.values)
            return not any(map(re.compile(r"\$\(|`").search, rest))
        if not first.startswith("[["):
            kept = [word for word in words if word.strip('"') not in ("$@", "${@}", "$*", "${*}")]
            self.commands.append([each for word in kept for each in self._variables.words(word)])
        if rest[count] in _SOURCES:
            if not _ENVIRONMENTS.search(" ".join(rest[count + 1 :])):
                self._lose(self._variables.values)
        elif rest[count] in _SETTERS and (rest[count] != "printf" or "-v" in rest):
            self._lose(_NAME.findall(" ".join(rest[count + 1 :])))
        return False

    def _assign(self, name: str, index: str | None, appends: str, text: str, *, known: bool) -> None:
        before = self._variables.values.get(name, "") if appends else ""
        if not known or index or text.startswith("(") or before is None:
            self._lose([name])
            return
        self._variables.values[name] = before + self._variables.text(text)
        if self._depth > 0:
            self._depth_of[name] = self._depth
        else:
            self._depth_of.pop(name, None)

    def _forget(self) -> None:
        """Lose the values of variables that the innermost block has set."""
        self._lose([name for name, depth in self._depth_of.items() if depth >= self._depth])

    def _lose(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._variables.values[name] = None
            self._depth_of.pop(name, None)
