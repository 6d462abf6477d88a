"""Prints each folder's files with their docstrings' first lines: `python -m tests.support.house_map`."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

import rlhf

PACKAGE = Path(rlhf.__file__).parent


def modules() -> dict[Path, str | None]:
    """Return the docstring (or None) of every non-empty module, by its path from the package's parent."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if text := path.read_text().strip():
            found[path.relative_to(PACKAGE.parent)] = ast.get_docstring(ast.parse(text))
    return found


def folders() -> set[Path]:
    """Return the package's folders with modules, itself included, by their paths from its parent."""
    return {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")}


def page() -> str:
    """Return the map as text, folder by folder."""
    lines: dict[Path, list[str]] = defaultdict(list)
    for path, docstring in modules().items():
        lines[path.parent].append(f"  {path.name:<22}{(docstring or '').partition(chr(10))[0]}\n")
    return "\n".join(f"{folder}/\n{''.join(lines[folder])}" for folder in sorted(lines))


if __name__ == "__main__":
    sys.stdout.write(page())
