"""Verb `prune`: removes from a stopped run what retention would remove, and leftovers of kills."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf import events
from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.commit import retention
from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.removal import to_trash
from rlhf.checkpoint.commit.retention import retire
from rlhf.checkpoint.verbs import pruning
from rlhf.config.resolved import to_yaml
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.lock import RANKS_LOCK, RUN_LOCK, lock_as_rank, run_lock
from rlhf.ranks.transport import Transport
from rlhf.storage.layout import POINTER, scan, step_dir
from rlhf.storage.scratch import lock_folder
from tests.support.checkpoints import PlainReference, PlainRole, flip_bit, listening, make_checkpointer, make_config
from tests.support.preload import forkserver
from tests.support.published import eventually, publish, publish_part, steps
from tests.support.thread_ranks import make_coordinator, run_thread_ranks
from tests.support.verified import verify

LEFTOVERS = (
    ".tmp-global_step_9-0123456789ab",
    ".trash-global_step_1-0123456789ab",
    ".upload-global_step_2-0123456789ab",
)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run with `max_to_keep=2 keep_every=4 keep_best=1` and checkpoints of the steps 1 to 8, of which 3 is best."""
    config = make_config(tmp_path)
    config.checkpoint = CheckpointConfig(max_to_keep=2, keep_every=4, keep_best=1)
    for step in range(1, 9):
        publish(config.run_dir, step, {"val/accuracy": 1.0 if step == 3 else step / 100})
    (config.run_dir / "resolved.yaml").write_text(to_yaml(config))
    return config.run_dir


def everything(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


def leave(run_dir: Path) -> None:
    """Make the folders that kills leave."""
    for name in LEFTOVERS:
        shutil.copytree(step_dir(run_dir, 1), run_dir / name)


@pytest.mark.parametrize("best", [0, 1])
def test_a_dry_run_beside_a_run_leaves_out_what_the_run_removes(run_dir, best, command, monkeypatch, caplog):
    """Step 1 is retired once the verb has found all checkpoints, step 2 once it has decided, step 5 while it counts."""
    of_rules, files = pruning.victims, pruning._files

    def counted(root: Path) -> Iterator[Path]:
        yield from files(root)
        if root.name == "global_step_5":
            to_trash(root)

    def found(run_dir: Path) -> list[Path]:
        every = scan(run_dir)
        to_trash(step_dir(run_dir, 1))
        return every

    def decided(*arguments: Any) -> list[Path]:
        with monkeypatch.context() as patch:
            patch.setattr(retention, "scan", found)
            chosen = of_rules(*arguments)
        to_trash(step_dir(run_dir, 2))
        return chosen

    monkeypatch.setattr(pruning, "victims", decided)
    monkeypatch.setattr(pruning, "_files", counted)
    code, out, err = command("prune", run_dir, f"--keep-best={best}", "--json")
    (document,) = json.loads(out)["runs"]
    assert (code, err, document["problem"]) == (0, "", None)
    going = [f"global_step_{step}" for step in ((6,) if best else (3, 6))]
    assert [entry["name"] for entry in document["going"] if entry["kind"] == "checkpoint"] == going
    assert not caplog.records


@pytest.mark.parametrize("there", [True, False])
def test_an_output_that_a_kill_left_without_a_name_stays(run_dir, there, command):
    """A kill between two renames left an export as `.replaced-...`. This export stays if it is the only one."""
    replaced = run_dir / ".replaced-huggingface-0123456789ab"
    replaced.mkdir()
    if there:
        (run_dir / "huggingface").mkdir()
    assert command("prune", run_dir, "--yes")[0] == 0
    assert replaced.exists() != there


def test_prune_removes_the_same_checkpoints_as_the_trainer(run_dir, tmp_path, command):
    settings = CheckpointConfig(max_to_keep=2, keep_every=4, keep_best=1)
    other = shutil.copytree(run_dir, tmp_path / "other")
    deleter = Deleter()
    retire(other, settings, 8, deleter, Coordinator(Transport()))
    assert deleter.wait(10)
    code, out, err = command("prune", run_dir, "--yes")
    assert (code, err) == (0, "")
    assert steps(run_dir) == steps(other) == [3, 4, 7, 8]
    assert [line.split()[1] for line in out.splitlines() if "removed" in line] == [
        f"global_step_{step}" for step in (1, 2, 5, 6)
    ]
    assert "keeps steps 3, 4, 7, 8; the newest intact one is 8" in out
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]
    assert "nothing to remove" in command("prune", run_dir, "--yes")[1]


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_without_yes_it_only_shows(run_dir, command, option):
    leave(run_dir)
    before = everything(run_dir)
    code, out, _ = command("prune", run_dir, *option)
    assert code == 0
    assert everything(run_dir) == before
    shown = [line.split()[2] for line in out.splitlines() if "would remove" in line]
    assert shown == [*(f"global_step_{step}" for step in (1, 2, 5, 6)), *sorted(LEFTOVERS)]
    assert "--yes removes" in out


def test_rules_on_the_command_line_override_the_stored_rules(run_dir, command):
    document = json.loads(command("prune", run_dir, "--keep-every", "null", "--max-to-keep", "1", "--json")[1])
    (run,) = document["runs"]
    assert run["rules"] == {"max_to_keep": 1, "keep_every": None, "keep_best": 1, "best_metric": None}
    assert [entry["name"] for entry in run["going"]] == [f"global_step_{step}" for step in (1, 2, 4, 5, 6, 7)]
    assert (run["kept"], run["newest_whole"], document["removed"]) == ([3, 8], 8, False)
    assert "nothing to remove" in command("prune", run_dir, "--max-to-keep", "null")[1]


def test_mistakes_are_one_line(run_dir, command):
    for arguments, message in (
        (["--max-to-keep", "0"], "--max-to-keep=0: must be a whole number of at least 1 or null."),
        (["--keep-best", "null"], "--keep-best=null: must be a whole number of at least 0."),
        (["--best-metric", "val/acuracy"], "Did you mean val/accuracy?"),
    ):
        code, out, err = command("prune", run_dir, *arguments)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert message in err
    assert "Give its run directory" in command("prune", step_dir(run_dir, 8))[2]
    assert "remote_max_to_keep" in command("prune", "s3://bucket/run")[2]
    (run_dir / "resolved.yaml").unlink()
    code, _, err = command("prune", run_dir)
    assert (code, "Give --max-to-keep" in err) == (2, True)
    assert steps(run_dir) == list(range(1, 9))


def test_the_newest_whole_checkpoint_stays(run_dir, command):
    """The newest intact checkpoint stays even if newer ones are damaged, which a resume will set aside."""
    for step in (8, 7):
        flip_bit(step_dir(run_dir, step) / "actor/model/weights", 9)
    code, out, _ = command("prune", run_dir, "--yes", "--max-to-keep", "1", "--keep-every", "null", "--keep-best", "0")
    assert code == 0
    assert steps(run_dir) == [6, 7, 8]
    assert "the newest intact one is 6" in out


def test_a_flipped_bit_is_seen_before_anything_goes(run_dir, command):
    """Without --yes the verb does not read the bytes; with --yes it does."""
    flip_bit(step_dir(run_dir, 8) / "actor/model/weights", 9)
    arguments = ("prune", run_dir, "--max-to-keep", "1", "--keep-every", "null", "--keep-best", "0", "--json")
    shown, done = (json.loads(command(*arguments, *act)[1])["runs"][0] for act in ([], ["--yes"]))
    assert (shown["newest_whole"], shown["kept"]) == (8, [8])
    assert (done["newest_whole"], done["kept"]) == (7, [7, 8])


def test_nothing_is_removed_if_no_checkpoint_is_intact(run_dir, command):
    leave(run_dir)
    (run_dir / "global_step_11.damaged-1").mkdir()
    for step in range(1, 9):
        (step_dir(run_dir, step) / "manifest.json").unlink()
    before = everything(run_dir)
    _, out, _ = command("prune", run_dir, "--yes", "--set-aside", "--max-to-keep", "1")
    assert "no checkpoint is intact, so nothing is removed" in out
    assert {name: raw for name, raw in everything(run_dir).items() if not name.endswith(".lock")} == before


def test_leftovers_are_removed_and_set_aside_folders_only_on_request(run_dir, command):
    leave(run_dir)
    aside = [f"global_step_{n}" for n in ("11.damaged-1", "12.superseded-1", "13.incomplete-2")]
    for name in aside:
        (run_dir / name).mkdir()
    abandoned, living = run_dir / ".incomplete-hf-0123456789ab", run_dir / ".incomplete-hf-ba9876543210"
    abandoned.mkdir()
    living.mkdir()
    lock = lock_folder(living)
    command("prune", run_dir, "--yes")
    left = {path.name for path in run_dir.iterdir()}
    assert left == {*aside, living.name, *(f"global_step_{s}" for s in (3, 4, 7, 8)), "resolved.yaml"} | {
        POINTER,
        RUN_LOCK,
        RANKS_LOCK,
    }
    os.close(lock)
    _, out, _ = command("prune", run_dir, "--yes", "--set-aside")
    assert not {path.name for path in run_dir.iterdir()} & {*aside, living.name}
    assert out.count("set aside") == 3


def test_a_reference_that_others_share_stays_and_is_not_counted(tmp_path, command):
    config = make_config(tmp_path)
    config.checkpoint.max_to_keep = None
    checkpointer = make_checkpointer(config, PlainRole(), reference=PlainReference(300_000))
    for step in (1, 2):
        checkpointer.save(step)
    (run,) = json.loads(command("prune", config.run_dir, "--yes", "--max-to-keep", "1", "--json")[1])["runs"]
    assert [entry["name"] for entry in run["going"]] == ["global_step_1"]
    assert run["bytes"] < 100_000
    assert verify(step_dir(config.run_dir, 2)).linked == {"ref/model": "global_step_1"}


def test_a_hard_linked_file_counts_as_freed_with_its_last_link(run_dir):
    (run_dir / "a").mkdir()
    (run_dir / "b").mkdir()
    (run_dir / "a/x").write_bytes(b"x" * 1000)
    os.link(run_dir / "a/x", run_dir / "b/x")
    a, b = run_dir / "a", run_dir / "b"
    assert pruning.bytes_freed([a]) == {a: 0}
    assert pruning.bytes_freed([a, b]) == {a: 0, b: 1000}


def test_the_pointer_is_never_wrong(run_dir, command):
    (run_dir / POINTER).write_text("5\n")
    seen = []

    def look(event: str) -> None:
        if event in ("commit.prune", "commit.trash"):
            pointed = int((run_dir / POINTER).read_text())
            seen.append(step_dir(run_dir, pointed).is_dir())

    with listening(look):
        command("prune", run_dir, "--yes")
    assert seen == [True] * 8
    assert (run_dir / POINTER).read_text() == "8\n"


def test_prune_of_a_running_run_is_an_error(run_dir, command, monkeypatch):
    monkeypatch.setattr(pruning, "RANKS_S", 0.1)
    with run_lock(run_dir):
        code, _, err = command("prune", run_dir, "--yes")
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"Another run is writing into {run_dir}: process {os.getpid()}" in err
    assert "then prune" in err
    rank = forkserver.Process(target=_rank, args=(run_dir, run_dir.parent / "holds"))
    rank.start()
    eventually((run_dir.parent / "holds").exists, 120)
    code, _, err = command("prune", run_dir, "--yes")
    rank.kill()
    rank.join()
    assert (code, "Ranks of an earlier start" in err) == (2, True)
    assert steps(run_dir) == list(range(1, 9))
    assert command("prune", run_dir, "--yes")[0] == 0


def _rank(run_dir: Path, holds: Path) -> None:
    lock_as_rank(run_dir)
    holds.touch()
    signal.pause()


def test_each_run_of_a_tree_is_pruned_by_its_own_rules(run_dir, tmp_path, command):
    other = shutil.copytree(run_dir, run_dir.with_name("other"))
    text = (other / "resolved.yaml").read_text()
    (other / "resolved.yaml").write_text(text.replace("keep_every: 4", "keep_every: 5"))
    third = shutil.copytree(run_dir, run_dir.with_name("third"))
    with run_lock(third):
        code, out, _ = command("prune", tmp_path, "--yes")
    assert code == 2
    assert (steps(run_dir), steps(other), steps(third)) == ([3, 4, 7, 8], [3, 5, 7, 8], list(range(1, 9)))
    assert f"Another run is writing into {third}" in out


def test_prune_rejects_a_checkpoint_on_several_disks(tmp_path):
    run_thread_ranks(2, _publish_on_two, tmp_path)
    with pytest.raises(UserError, match="removes a step from all disks"):
        pruning.plan_pruning(tmp_path / "disk0", CheckpointConfig(max_to_keep=1), set_aside=False, verify=verify)


def _publish_on_two(rank: int, tmp_path: Path) -> None:
    coordinator = make_coordinator()
    coordinator.domains = [0, 1]
    for step in (1, 2):
        publish_part(tmp_path / f"disk{rank}", step, coordinator)


@pytest.mark.parametrize("event", ["commit.prune", "commit.trash"])
@pytest.mark.parametrize("number", [1, 3])
def test_a_kill_leaves_nothing_half_removed(run_dir, command, event, number):
    victim = forkserver.Process(target=_killed, args=(run_dir, event, number))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    for step in steps(run_dir):
        verify(step_dir(run_dir, step))
    gone = set(range(1, 9)) - set(steps(run_dir))
    assert gone == set([1, 2, 5, 6][: number - (event == "commit.prune")])
    assert int((run_dir / POINTER).read_text()) == 8
    assert command("prune", run_dir, "--yes")[0] == 0
    assert steps(run_dir) == [3, 4, 7, 8]
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]


def _killed(run_dir: Path, event: str, number: int) -> None:
    seen = 0

    def kill(found: str) -> None:
        nonlocal seen
        seen += found == event
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    events.subscribe(kill)
    main(["prune", str(run_dir), "--yes"])
