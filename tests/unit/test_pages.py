"""Pages of the documentation: prose in 120 columns, and links that lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import rlhf

ROOT = Path(rlhf.__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "docker/README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def prose(page: Path) -> Iterator[str]:
    """The lines outside fenced blocks."""
    inside = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield line


def anchors(page: Path) -> set[str]:
    """The names of its headings, as the pages' usual renderers make them."""
    titles = (line.lstrip("#").strip().lower() for line in prose(page) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_lines_have_at_most_120_columns():
    long = [(page.name, line) for page in PAGES for line in prose(page) if len(line) > 120 and line[0] != "|"]
    assert long == []


def test_links_lead_somewhere():
    found, broken = 0, []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", " ".join(prose(page))):
            path, _, anchor = target.partition("#")
            if path.startswith(("http:", "https:")):
                continue
            found += 1
            to = (page.parent / path) if path else page
            if not to.exists() or (anchor and anchor not in anchors(to)):
                broken.append((page.name, target))
    assert found > 50
    assert broken == []


def test_the_site_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    trees = "".join(re.findall(r"^```{toctree}\n(.*?)^```", index, re.MULTILINE | re.DOTALL))
    listed = re.findall(r"^(?:.+<)?([a-z/-]+)>?$", trees, re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES if ROOT / "docs" in page.parents]
    assert sorted(listed) == sorted(set(pages) - {"index"})


def test_pages_save_python_files_under_different_names():
    """A reader of two pages works in one folder."""
    names = [name for page in PAGES for name in re.findall(r"<!-- file: (\S+\.py) -->", page.read_text())]
    assert len(names) > 1
    assert sorted(set(names)) == sorted(names)


def test_tables_are_whole():
    """A blank line or a missing cell in a table breaks its rendering."""
    broken = []
    for page in PAGES:
        lines = ["", *prose(page), ""]
        for above, line, below in zip(lines, lines[1:], lines[2:], strict=False):
            rule, last = re.fullmatch(r"\|[-| :]+\|", below), not below.startswith("|")
            begins = line.startswith("|") and not above.startswith("|")
            headless = (begins and not rule) or (re.fullmatch(r"\|[-| :]+\|", line) and last)
            uneven = line.startswith("|") and above.startswith("|") and cells(above) != cells(line)
            if headless or uneven:
                broken.append((page.name, line))
    assert broken == []


def cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row)))
