"""Parses `env.command`: finds the program that runs each episode, and the files that the command names."""

import ast
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.errors import UserError, did_you_mean, nearest_path

COMMAND = "env.command"


def split_command(command: str) -> list[str]:
    """Return the program's arguments. `python` is the trainer's Python. Paths of files become absolute, because the
    program runs in a folder of its own.

    Raises:
        UserError: a missing program or Python file, or a Python file with a syntax error.
    """
    shown = f"{COMMAND}={command!r}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"{shown}: {error}. Correct the quotes.") from error
    if not words:
        raise UserError(f"{shown} is empty. Name a program, such as 'python agent.py', or set null.")
    found = [str(Path(word).expanduser().absolute()) if _is_file(word) else word for word in words]
    if words[0] in ("python", "python3"):
        found[0] = sys.executable
    elif (program := shutil.which(found[0])) is None:
        raise UserError(f"{shown}: no program {words[0]}. Correct the name, or install the program.")
    else:
        found[0] = program
    for word, path in zip(words, found, strict=True):
        if word.endswith(".py"):
            _check_python(shown, Path(path))
    return found


def files_of(command: str | None) -> list[str]:
    """Return the absolute paths of the files that the command names."""
    return [str(Path(word).expanduser().absolute()) for word in shlex.split(command or "") if _is_file(word)]


def label_of(arguments: Sequence[str]) -> str:
    """Return a name for metrics: the stem of the first Python file in the arguments, or else of the program."""
    script = next((word for word in arguments[1:] if word.endswith(".py")), arguments[0])
    return Path(script).stem


def _is_file(word: str) -> bool:
    return not word.startswith("-") and Path(word).expanduser().is_file()


def _check_python(shown: str, path: Path) -> None:
    if not path.is_file():
        near = did_you_mean(nearest_path(path.absolute(), lambda other: other.suffix == ".py" and other.is_file()))
        raise UserError(f"{shown}: no file {path}.{near} Correct the path (relative to {Path.cwd()}).")
    try:
        ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError, OSError) as error:
        raise UserError(f"{shown}: {path} cannot be read as Python: {error}. Correct it.") from error
