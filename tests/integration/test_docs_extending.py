"""docs/extending.md: its data set, reward and callback train together, and its verb adds up a checkpoint's bytes."""

import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

from rich.console import Console

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from tests.support.launching import ROOT
from tests.support.refusals import says

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"<!-- file: ([^\n]*?) -->\n```\w*\n(.*?)```\n", PAGE, flags=re.DOTALL))
COMMANDS = dict(re.findall(r"<!-- command: ([^\n]*) -->\n```\n(.*?)\n```\n", PAGE, flags=re.DOTALL))


def test_the_files_of_the_page(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    lines: list[str] = []
    for command in COMMANDS["callback"].split(" && "):
        arguments = [sys.executable, *command.split()[1:]]
        done = subprocess.run(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        lines += done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["step 1", "step 2"]
    assert lines[-1] == "stopped; the same call continues the run"
    named = [sys.executable, *COMMANDS["callback by recipe"].split()[1:]]
    done = subprocess.run(named, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == EXIT_USER_ERROR, done.stderr
    says(done.stdout, "step 1: ")
    says(done.stderr, "trainer.callbacks=stop_early.py:stop_early", "step 1", "GoodEnough")
    assert list((tmp_path / "checkpoints/rlhf/early_by_recipe").glob("global_step_*"))
    (checkpoint,) = (tmp_path / "checkpoints/rlhf/early").glob("global_step_*")
    with (tmp_path / "total.txt").open("w") as file:
        verb = runpy.run_path(str(tmp_path / "total.py"))
        path = SimpleNamespace(path=str(tmp_path / "checkpoints/rlhf/early"))
        assert verb["run"](path, Console(file=file)) == EXIT_DONE
    assert int((tmp_path / "total.txt").read_text()) == read_manifest(checkpoint).total_bytes
