"""Writes docs/settings.md, every setting with its help: `python -m rlhf.config.settings_page > docs/settings.md`."""

import json
import sys
from itertools import groupby
from typing import Any

from rlhf.config import Config
from rlhf.config.help_texts import help_texts
from rlhf.config.known_settings import SETTINGS, Setting

HEADING = """\
# Settings

<!-- Made by `python -m rlhf.config.settings_page`. Edit the schema in rlhf/config/, not this page. -->

Every setting with the schema's default. Entries of groups (`conf/`) and recipes change defaults:
`python -m rlhf.train --cfg job` shows the values of a run. [Configuration](configuration.md) explains how to set them.

The column "On a resume" says what happens if the value differs from the checkpoint's. *harmless*: the run continues
with the new value. *start*: the setting has an effect only where a run begins. An empty cell: results depend on the
setting, and the command ends with an error unless you set `trainer.allow_config_change=true`.
"""


def settings_page() -> str:
    default = Config()
    text = HEADING
    for section, settings in groupby(SETTINGS.values(), key=lambda setting: setting.key.partition(".")[0]):
        text += f"\n## {section}\n\n| Setting | Default | Values | On a resume | Effect |\n|---|---|---|---|---|\n"
        text += "".join(
            _row(setting, None if setting.metadata["by_device"] else setting.value(default)) for setting in settings
        )
    return text


def _row(setting: Setting, default: Any) -> str:
    resume = setting.metadata["resume"]
    cells = [
        f"`{setting.key}`",
        f"`{_shown(default)}`",
        _values(setting),
        "" if resume == "trajectory" else resume,
        help_texts().get(setting.key, ""),
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    return value or '""' if isinstance(value, str) else json.dumps(value)


def _values(setting: Setting) -> str:
    rules = setting.metadata
    if rules["choices"]:
        return ", ".join(f"`{choice}`" for choice in rules["choices"])
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"))
    bounds = [f"{sign} {rules[key]}" for key, sign in signs if rules[key] is not None]
    return ", ".join([setting.expects, *bounds])


if __name__ == "__main__":
    sys.stdout.write(settings_page())
