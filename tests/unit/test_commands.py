"""`python -m rlhf` lists every command."""

import importlib.util
import subprocess
import sys

from rlhf.__main__ import COMMANDS
from rlhf.cli.completion import OPTIONS


def test_the_list_has_every_command():
    shown = subprocess.run([sys.executable, "-m", "rlhf"], capture_output=True, text=True, check=True).stdout
    assert COMMANDS.keys() == OPTIONS.keys()
    for name in COMMANDS:
        assert f"python -m {name} " in shown
        assert importlib.util.find_spec(name) is not None
