"""Reads the help of every setting from its docstring in the schema, and writes YAML with the help as comments."""

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import yaml

from rlhf.config import Config

WIDTH = 110


@cache
def help_texts() -> dict[str, str]:
    """Return the help of each setting by its dotted name, in one line."""
    return dict(_walk(Config, ""))


def _walk(section: type, prefix: str) -> Iterator[tuple[str, str]]:
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(section)).body[0]).body
    kinds = typing.get_type_hints(section)
    for field, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name = field.target.id
        if is_dataclass(kinds[name]):
            yield from _walk(typing.cast(type, kinds[name]), f"{prefix}{name}.")
        elif isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield prefix + name, " ".join(str(below.value.value).split())


def commented_yaml(section: Mapping[str, Any], prefix: str = "") -> str:
    """Return `section`, nested plain dictionaries, as YAML: the help of each setting is a comment above the setting."""
    indent = "  " * prefix.count(".")
    text = ""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in help_texts():
            text += f"{indent}{name}:\n{commented_yaml(value, key + '.')}"
            continue
        comment = textwrap.wrap(help_texts()[key], WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
        text += "".join(f"{indent}# {line}\n" for line in comment)
        text += textwrap.indent(yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True), indent)
    return text
