"""The built site in headless Chromium: each page loads without an error or an outside request, and fits the screen."""

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.browser import DESKTOP, PHONE, needs_browser, visit

SITE = os.environ.get("RLHF_SITE")
"""Folder of the built site: `python -m sphinx docs FOLDER`."""
pytestmark = [needs_browser, pytest.mark.skipif(SITE is None, reason="RLHF_SITE names no built site")]
PAGES = ("index", "first-model", "environments", "settings", "api", "repository/readme")
FITS = "document.documentElement.scrollWidth <= innerWidth"
FOUND = """(async () => {
  for (let tries = 0; tries < 200; tries++) {
    const links = [...document.querySelectorAll("#search-results li a")].map(each => each.textContent);
    if (links.includes("Settings")) return links;
    await new Promise(done => setTimeout(done, 50));
  }
  return [];
})()"""


class Quiet(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        # Browsers ask each server for an icon, which the site has not.
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the site. The search needs a server, because browsers forbid it to read local files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (PHONE, True)])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_the_site_is_silent_and_fits(site, page, tmp_path, size, dark):
    seen = visit(f"{site}{page}.html", tmp_path / "profile", size=size, dark=dark, script=FITS)
    assert seen.errors == []
    assert [address for address in seen.requests if not address.startswith((site, "data:"))] == []
    assert seen.result, "the page is wider than the screen"


def test_the_search_finds_a_setting(site, tmp_path):
    seen = visit(f"{site}search.html?q=save_freq", tmp_path / "profile", script=FOUND)
    assert seen.errors == []
    assert "Settings" in seen.result
