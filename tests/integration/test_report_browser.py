"""Pages of runs in headless Chromium: no error, no request, no overflow, readable values, in light and dark."""

from pathlib import Path

import pytest

from rlhf.tracking.page import write_page
from tests.support.browser import DESKTOP, PHONE, needs_browser, visit
from tests.support.run_folders import run_folder

pytestmark = needs_browser
FACTS = """[document.title, document.documentElement.scrollWidth <= innerWidth,
  getComputedStyle(document.body).backgroundColor]"""
READ = """(() => { const figure = document.querySelector("figure"); figure.focus();
  for (const key of ["ArrowLeft", "ArrowLeft"])
    figure.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  return [...document.querySelectorAll("figure .reading")].map(each => each.textContent) })()"""
LOAD_S = 2.0


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of a run of 10,000 steps whose texts try to run scripts."""
    folder = tmp_path_factory.mktemp("browser")
    path = folder / "page.html"
    write_page(path, [run_folder(folder / "run", 10_000, samples=True)])
    return path


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_a_page_is_silent_and_fits(page, tmp_path, size, dark):
    seen = visit(f"file://{page}", tmp_path / "profile", size=size, dark=dark, script=FACTS)
    assert seen.errors == []
    assert seen.requests == [f"file://{page}"]
    title, fits, back = seen.result
    assert title == "run – rlhf report", "a script of a sample has run"
    assert fits
    assert back == ("rgb(19, 21, 24)" if dark else "rgb(251, 251, 250)")


def test_10_000_steps_open_quickly_and_keys_read_values(page, tmp_path):
    seen = visit(f"file://{page}", tmp_path / "profile", script=READ)
    assert page.stat().st_size < 3_000_000
    assert seen.load_s < 5 * LOAD_S, "five times the limit, as tests may run beside each other"
    assert len(seen.result) >= 10
    assert all(reading.startswith("step 9,9") for reading in seen.result if reading), seen.result
    assert any("mean" in reading for reading in seen.result)
