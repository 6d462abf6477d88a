"""Kills of `import` and `convert`: nobody sees half a target, and the same command again makes a whole one."""

import os
import signal
from pathlib import Path

import pytest

from rlhf import events
from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.commit.manifest import verify
from tests.support.launching import TINY_POLICY
from tests.support.preload import forkserver

MOMENTS = [("target.begin", 1), ("commit.file_write", 1), ("commit.file_write", 3), ("target.synced", 1)]
"""Events and which of their kind: an empty folder, a header without its tensors, files without a manifest, all but the
name."""


def run_verb(command: list[str], moment: tuple[str, int] | None) -> None:
    seen = 0

    def kill(event: str) -> None:
        nonlocal seen
        seen += moment is not None and event == moment[0]
        if moment is not None and seen == moment[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    events.subscribe(kill)
    os._exit(main(command))


def exit_code(command: list[str], moment: tuple[str, int] | None = None) -> int | None:
    process = forkserver.Process(target=run_verb, args=(command, moment))
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.parametrize("verb", ["import", "convert"])
def test_a_killed_verb_leaves_no_half_target_and_again_it_finishes(tmp_path, verb):
    target: Path = tmp_path / "out" / "global_step_0"
    command = [verb, str(TINY_POLICY), str(target), *(["--to", "dcp"] if verb == "convert" else [])]
    for moment in MOMENTS:
        assert exit_code(command, moment) == -signal.SIGKILL, moment
        (left,) = target.parent.iterdir()
        assert left.name.startswith(".incomplete-global_step_0-"), moment
    assert exit_code(command) == 0
    assert list(target.parent.iterdir()) == [target]
    if verb == "import":
        verify(target)
    assert main(["diff", str(TINY_POLICY), str(target), "--only", "weights"]) == 0
