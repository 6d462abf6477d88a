"""Sphinx's configuration of the site: `python -m sphinx -W --keep-going docs build/html`."""

import os
import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = {
    "README.md": "repository/readme.md",
    "CONTRIBUTING.md": "repository/contributing.md",
    "CHANGELOG.md": "repository/changelog.md",
    "docker/README.md": "repository/images.md",
}
"""Pages outside docs/, by their paths in the repository, and the pages of the site that show them."""
PAGE_OF = {f"{Path(page).with_suffix('')}": path for path, page in ELSEWHERE.items()}
NAME = re.compile(r'(?<=<span class="pre">)[^<]+')
OPTION = re.compile(r"(?<=[\s>])--?[A-Za-z][\w-]*")
FILE = re.compile(r"^<!-- file: (\S+) -->\n```(\w*)\n", re.MULTILINE)
FENCE = re.compile(r"^(```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)\s#]+)(#[^)\s]*)?\)")

project = "rlhf"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_static"]
html_theme = "furo"
html_title = f"rlhf {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
highlight_language = "text"
html_show_sphinx = False
html_show_copyright = False
myst_heading_anchors = 4
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
default_role = "code"
nitpicky = True
# The site is built offline, without the references of Python and torch.
nitpick_ignore_regex = [("py:.*", r"(?!rlhf\.).*")]


def rewrite_links(text: str, path: Path, page: Path) -> str:
    """Return a page's text with links that work on the site.

    A link to a page outside docs/ leads to the page of the site that shows it. A link to a folder becomes plain text. A
    link to any other file of the repository stays, and the site offers the file as a download.

    Args:
        path: the file with the text. Its links are relative to the file's folder.
        page: the page of the site.
    """

    def rewrite(match: re.Match[str]) -> str:
        shown, target, anchor = match[1], match[2], match[3] or ""
        to = (path.parent / target).resolve()
        if to.is_dir():
            return shown
        inside = ELSEWHERE.get(str(to.relative_to(ROOT)))
        to = to if inside is None else DOCS / inside
        return f"[{shown}]({os.path.relpath(to, page.parent)}{anchor})"

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(rewrite, part) for part in parts[::2]]
    return "".join(parts)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Show files outside docs/ on their pages of the site, rewrite links, and show the names of files in captions."""
    page = DOCS / f"{name}.md"
    path = ROOT / PAGE_OF[name] if name in PAGE_OF else page
    if path != page:
        app.env.note_dependency(str(path))
        source[0] = path.read_text()
    text = rewrite_links(source[0], path, page)
    source[0] = FILE.sub(lambda match: f"```{{code-block}} {match[2] or 'text'}\n:caption: {match[1]}\n\n", text)


def parse_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Parse the sections of a docstring in Google's style. Docstrings of attributes have none: there, Sphinx's napoleon
    extension would take the words before a colon for a type."""
    if what not in ("attribute", "data", "property"):
        lines[:] = GoogleDocstring(lines, Config(napoleon_use_rtype=False), app, what, name, obj, options).lines()


def break_names(app: Sphinx, name: str, template: str, context: dict[str, object], doctree: object) -> None:
    """Allow line breaks in names of code after dots, slashes and underscores, so that tables fit the screen, but none
    in options such as --config-dir."""
    body = OPTION.sub(r'<span class="option">\g<0></span>', str(context.get("body", "")))
    context["body"] = NAME.sub(lambda match: re.sub(r"(?<=[._/])(?=\w)", "<wbr>", match[0]), body)


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", parse_docstring)
    app.connect("html-page-context", break_names)
