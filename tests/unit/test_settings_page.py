"""docs/settings.md: it equals the page made from the schema, and it has help for every setting."""

from pathlib import Path

import rlhf
from rlhf.config.help_texts import help_texts
from rlhf.config.known_settings import SETTINGS
from rlhf.config.settings_page import settings_page

PAGE = Path(rlhf.__file__).parents[1] / "docs/settings.md"


def test_the_page_is_what_the_schema_makes() -> None:
    assert PAGE.read_text() == settings_page(), "run: python -m rlhf.config.settings_page > docs/settings.md"


def test_every_setting_has_a_help() -> None:
    assert help_texts().keys() == SETTINGS.keys()
