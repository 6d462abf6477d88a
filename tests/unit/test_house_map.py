"""CONTRIBUTING.md maps the top folders, and every folder and module says in one line what it is."""

import ast
import re
from pathlib import Path

from tests.support.house_map import PACKAGE, folders, modules, page

ROOT = PACKAGE.parent
RIDDLE = re.compile(r"(What|How|Where|When|Which|Who|Whoever|Why)\b")


def mapped() -> set[Path]:
    """The folders of the map, by their paths; two columns of indentation are one level."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = text[text.index("\n## Map of the code") :].split("```")[1]
    found: set[Path] = set()
    parents: list[str] = []
    for indent, name in re.findall(r"^( *)([\w.]+)/  ", block, re.MULTILINE):
        parents = [*parents[: len(indent) // 2], name]
        found.add(Path(*parents))
    return found


def wrong(docstring: str | None) -> str | None:
    if docstring is None:
        return "no docstring"
    line, _, rest = docstring.partition("\n")
    if RIDDLE.match(line):
        return f"names its subject late: {line}"
    if not line.endswith(".") or (rest and not rest.startswith("\n")):
        return f"its first line can't stand by itself: {line}"
    return None


def test_the_map_has_the_top_folders_and_no_folder_that_is_gone():
    top = {path for path in folders() if len(path.parts) <= 2}
    assert {path for path in mapped() if path.parts[0] == PACKAGE.name and len(path.parts) <= 2} == top
    assert [path for path in mapped() if not (ROOT / path).is_dir()] == []


def test_every_folder_is_described_by_its_package():
    described = modules()
    assert [path for path in folders() if path / "__init__.py" not in described] == []


def test_every_module_says_what_it_is_in_one_line():
    problems = {str(path): problem for path, docstring in modules().items() if (problem := wrong(docstring))}
    assert problems == {}


def test_docstrings_are_no_riddles():
    """Check the package's public names, and every module of the tests and benchmarks."""
    riddles = []
    for path in (path for folder in (PACKAGE.name, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = ast.walk(tree) if PACKAGE in path.parents else [tree]
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = getattr(node, "name", "the module")
                if not name.startswith("_") and RIDDLE.match(ast.get_docstring(node) or ""):
                    riddles.append(f"{path}: {name}")
    assert riddles == []


def test_the_page_lists_every_module():
    text = page()
    assert all(f"{path.parent}/\n" in text and f"  {path.name} " in text for path in modules())
