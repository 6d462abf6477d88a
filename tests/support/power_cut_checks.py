"""Checks that a start after a simulated power cut finds what the run had promised before."""

import shutil
import traceback
from dataclasses import replace
from pathlib import Path

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.config import Config
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import DRIVER_STATE, POINTER, TEMPORARY, TRASH, UPLOAD, scan, step_dir, step_of
from rlhf.storage.reading import CheckedFiles
from tests.support.checkpoints import equal_bits
from tests.support.power_cut_runs import Promises, Start, TinyRun, results_of, samples_of
from tests.support.thread_ranks import run_thread_ranks
from tests.support.verified import verify


def wrong(promises: Promises, root: Path, *, go_on: bool = True) -> list[str]:
    """Run the command again on the state in `root`, and return broken promises as lines.

    With `go_on` the start runs and saves a further step.
    """
    found = [line for config in promises.start.configs for line in wrong_pointer(config.run_dir)]
    found += _wrong_files(promises, root)
    if len(promises.start.configs) == 1:
        found += _halves(promises.start.config.run_dir)
    try:
        if promises.start.config.checkpoint.remote is not None and not go_on:
            return found + broken_promises_on_an_empty_disk(promises)
        found += on_every_rank(promises.start, lambda rank: _wrong_start(promises, rank, go_on))
    except Exception:
        return [*found, f"the start fails: {traceback.format_exc()}"]
    for config in promises.start.configs:
        found += _left_behind(config) + wrong_pointer(config.run_dir) + _not_kept(promises, config)
    return found


def broken_promises_on_an_empty_disk(promises: Promises) -> list[str]:
    """Start as on another machine, with only the remote's copies, and return broken promises as lines."""
    shutil.rmtree(promises.start.config.run_dir, ignore_errors=True)
    run = TinyRun(promises.start, trajectory=9)
    run.finish()
    if promises.copied is None:
        return []
    saved = [saved for saved in promises.begun if saved.mark >= promises.copied.mark]
    return _wrong_state(replace(promises, allowed=saved, may_be_none=False), run)


def on_every_rank(start: Start, function) -> list[str]:  # type: ignore[no-untyped-def]
    """Return the results of `function(rank)` on all ranks of `start`, one after the other."""
    world = len(start.configs)
    if world == 1:
        return function(0)
    return [line for lines in run_thread_ranks(world, function) for line in lines]


def wrong_pointer(run_dir: Path) -> list[str]:
    """Check that a pointer, if any, names an existing checkpoint."""
    path = run_dir / POINTER
    if not path.exists():
        return []
    text = path.read_text()
    if not text.endswith("\n") or not text.strip().isdecimal() or not step_dir(run_dir, int(text)).is_dir():
        return [f"the pointer says {text!r}, and there are {[path.name for path in scan(run_dir)]}"]
    return []


def _halves(run_dir: Path) -> list[str]:
    """Return published checkpoints that lack files. A deletion leaves none, because it renames a checkpoint first."""
    found = []
    for path in scan(run_dir):
        try:
            entries = read_manifest(path).files
            files = CheckedFiles(path, entries)
            for name in entries:
                files.check_entry(name)
        except DamagedCheckpoint as problem:
            found.append(f"{path.name} is not whole: {problem}")
    return found


def _wrong_files(promises: Promises, root: Path) -> list[str]:
    found = []
    for name, is_whole in promises.whole.items():
        path = root / name
        if path.exists() and not is_whole(path.read_bytes()):
            found.append(f"{name} is neither the old nor the new one: {path.read_bytes()[:60]!r}")
    return found + [f"{name} is gone" for name in promises.there if not (root / name).exists()]


def _wrong_start(promises: Promises, rank: int, go_on: bool) -> list[str]:
    """Start this rank; check the state that it finds and, with `go_on`, its next save."""
    run = TinyRun(promises.start, rank, trajectory=9)
    found = _wrong_state(promises, run)
    if rank == 0 and promises.run_id is not None and run.run_id != promises.run_id:
        found.append(f"the run is called {run.run_id} instead of {promises.run_id}")
    if promises.journal:
        found += _wrong_journal(promises, run)
    if go_on:
        found += _wrong_save(run)
    run.finish()
    return found


def _wrong_save(run: TinyRun) -> list[str]:
    run.step()
    run.save()
    run.finish()
    found = []
    path = scan(run.config.run_dir)[0]
    if step_of(path) != run.driver.step:
        found.append(f"a save of step {run.driver.step} left {path.name} as the newest")
    if len(run.coordinator.domain_leaders) == 1:
        verify(path)
    if run.rank == 0 and run.recorded() != run.history:
        found.append("the history is wrong after a further step")
    return found


def _wrong_state(promises: Promises, run: TinyRun) -> list[str]:
    marks = [saved.mark for saved in promises.allowed]
    if not run.resumed:
        found = [] if promises.may_be_none else [f"nothing is found, but {marks} were saved"]
        return found + ([f"nothing is found but a history of {len(run.history)}"] if run.history else [])
    mark = run.part.state["mark"]
    saved = next((saved for saved in promises.allowed if saved.mark == mark), None)
    if saved is None:
        return [f"save {mark} (step {run.driver.step}) is found, but one of {marks} was promised"]
    found = []
    if not equal_bits(run.everything(), saved.states[run.rank]):
        found.append(f"save {mark} is found with another state than was saved")
    if run.rank == 0 and run.history != saved.history:
        found.append(f"the history of save {mark} is {run.history} instead of {saved.history}")
    return found


def _wrong_journal(promises: Promises, run: TinyRun) -> list[str]:
    assert run.journal is not None
    step = run.driver.step + 1
    run.journal.begin(step, step - 1, None)
    found = []
    for uid, what in sorted((uid, what) for noted, uid, what in promises.journal if noted == step):
        samples = what == "samples"
        known: list | None = run.journal.samples([uid]) if samples else run.journal.results([uid])
        if known != [samples_of(uid, step) if samples else results_of(uid, step)]:
            found.append(f"the journal of step {step} lacks the {what} of prompt {uid}")
    return found


def _left_behind(config: Config) -> list[str]:
    names = sorted(path.name for path in config.run_dir.iterdir())
    return [f"left behind: {name}" for name in names if name.startswith((TEMPORARY, TRASH, UPLOAD))]


def _not_kept(promises: Promises, config: Config) -> list[str]:
    run_dir = config.run_dir
    aside = [path for path in run_dir.glob("global_step_*.*") if path.is_dir()]
    found = [f"{path.name}: half a checkpoint" for path in aside if "superseded" not in path.name]
    if promises.damage:
        found = []
    texts = [path.read_text() for path in run_dir.glob(f"global_step_*/{DRIVER_STATE}")]
    lost = [mark for mark in promises.kept if not any(f'"mark": {mark}\n' in text for text in texts)]
    return found + [f"save {mark}, which was set aside, is gone" for mark in lost]
