"""Composes, calls and runs the command for tests, and lists the bundled recipes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import train
from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.errors import EXIT_USER_ERROR

ROOT = Path(train.__file__).resolve().parents[1]
BUNDLED = Library.find(None)
RECIPES = BUNDLED.entries("recipes")


def compose(*overrides: str, config_dir: Path | None = None) -> Config:
    """Return the configuration of a command."""
    return compose_config(list(overrides), Library.find(config_dir))


def command_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the error message of `python -m rlhf.train ARGV` on stderr."""
    assert train.main(list(argv)) == EXIT_USER_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    return err.removeprefix("error: ").rstrip("\n")


def run(cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the interpreter with `arguments` to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
