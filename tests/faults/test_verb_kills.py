"""Verbs that write a folder, killed at file operations and at random instants. No partial target is visible, and the
same command again finishes without leftovers."""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf import events
from rlhf.checkpoint.__main__ import main
from tests.support import tiny_models
from tests.support.preload import forkserver
from tests.support.verified import verify

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
DEADLINE_S = 120.0
AT_OPERATIONS, AT_RANDOM = 6, 2
"""Number of kills of each command at file operations and at random times. --full-product kills at every operation."""
Bytes = Mapping[str, bytes]


@dataclass(frozen=True)
class Command:
    """A verb with its arguments, its target, and a function that checks whether the target is complete."""

    arguments: tuple[str, ...]
    whole: Callable[[Bytes, Bytes, Path], bool]
    target: str = "target"


def same(found: Bytes, wanted: Bytes, target: Path) -> bool:
    return found == wanted


def intact(found: Bytes, wanted: Bytes, target: Path) -> bool:
    """Check a checkpoint of this trainer. Its bytes differ from those of another import, because run ids differ."""
    verify(target)
    return found.keys() == wanted.keys()


COMMANDS = {
    "merge": Command(("merge", "--local_dir", "run", "--target_dir", "target", "--max-shard-size", "8KB"), same),
    "export": Command(("export", "run", "target", "--dtype", "bfloat16"), same),
    "convert to DCP": Command(("convert", "model", "target", "--to", "dcp"), same),
    "convert to Megatron": Command(("convert", "model", "target", "--to", "megatron", "--tp", "2"), same),
    "import": Command(("import", "model", "imported/global_step_1"), intact, "imported/global_step_1"),
}


SLOW = {("import", True), ("convert to DCP", False)}
"""Cases that run by default besides `merge`; the others need --full-product. True: an old target exists."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "old" in metafunc.fixturenames:
        cells = [(name, old) for name in COMMANDS for old in (False, True)]
        if not metafunc.config.getoption("full_product"):
            cells = [cell for cell in cells if cell[0] == "merge" or cell in SLOW]
        marked = [pytest.param(*cell, marks=() if cell[0] == "merge" else pytest.mark.slow) for cell in cells]
        metafunc.parametrize(("name", "old"), marked)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    tiny_models.causal_lm("llama", folder / "model")
    assert main(["import", str(folder / "model"), str(folder / "run" / "global_step_1")]) == 0
    return folder


def _run(home: str, arguments: list[str], number: int, sender: Any) -> None:
    """Run a command in `home`, and end this process at file operation `number`. Send the number of operations."""
    os.chdir(home)
    done = 0

    def operation() -> None:
        nonlocal done
        done += 1
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audited(event: str, details: tuple) -> None:
        changes = event in CHANGES or (
            event == "open" and isinstance(details[2], int) and details[2] & 3 != os.O_RDONLY
        )
        # A file opened by its descriptor has been counted already; Python writes compiled modules in this way.
        if changes and not isinstance(details[0], int) and str(Path(home) / os.fsdecode(details[0])).startswith(home):
            operation()

    events.subscribe(lambda event: operation())
    sys.addaudithook(lambda event, details: audited(event, details) if event in CHANGES or event == "open" else None)
    code = main(arguments)
    sender.send((code, done))


def run(home: Path, command: Command, number: int = 0, after_s: float | None = None, *more: str) -> tuple[Any, float]:
    """Run a command in a process. Return what it sent (None if it was killed) and its seconds."""
    receiver, sender = forkserver.Pipe(duplex=False)
    started = time.monotonic()
    process = forkserver.Process(target=_run, args=(str(home), [*command.arguments, *more], number, sender))
    process.start()
    sender.close()
    try:
        if after_s is not None:
            process.join(after_s)
            process.kill()
        process.join(DEADLINE_S)
        assert process.exitcode is not None, f"still there after {DEADLINE_S} s"
    finally:
        process.kill()
        process.join()
    return (receiver.recv() if process.exitcode == 0 and receiver.poll() else None), time.monotonic() - started


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.fixture
def home(sources, tmp_path) -> Path:
    for name in ("model", "run"):
        (tmp_path / name).symlink_to(sources / name)
    return tmp_path


def test_a_killed_verb_leaves_a_complete_target_or_none(home, name, old, request):
    command, target = COMMANDS[name], home / COMMANDS[name].target
    more = ["--overwrite"] if old else []
    (done, seconds) = run(home, command)
    assert done is not None
    code, operations = done
    assert code == 0
    assert operations > 15
    wanted, neighbours = files_below(target), names(target.parent)
    before = {"config.json": b"1"}
    rng = random.Random(f"{name} {old}")
    chosen = range(1, operations + 1 + 3 * old)
    if not request.config.getoption("full_product"):
        # The target appears at one of the last operations.
        chosen = sorted({*rng.sample(chosen, AT_OPERATIONS - 3), *chosen[-3:]})
    kills: list[tuple[int, float | None]] = [(number, None) for number in chosen]
    kills += [(0, rng.uniform(0.0, seconds)) for _ in range(AT_RANDOM)]
    killed = 0
    for number, after_s in kills:
        shutil.rmtree(target)
        if old:
            target.mkdir()
            (target / "config.json").write_bytes(before["config.json"])
        done, _ = run(home, command, number, after_s, *more)
        killed += done is None
        found = files_below(target) if target.exists() else None
        assert found is not None or not old, f"an old target is gone after {number or after_s}"
        if found is not None and found != before:
            assert command.whole(found, wanted, target), f"half a target after {number or after_s}"
        again = ["--overwrite"] if found is not None else []
        assert main([*_in(home, command), *again]) == 0
        assert command.whole(files_below(target), wanted, target)
        assert names(target.parent) == neighbours, "leftovers"
    assert killed >= len(chosen) - 3


def _in(home: Path, command: Command) -> list[str]:
    """Return the arguments with paths relative to another folder."""
    return [
        str(home / word) if word in ("model", "run", "target", command.target) else word for word in command.arguments
    ]
