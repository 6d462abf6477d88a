"""Names of files and directories that a power cut must leave, or must not bring back."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf.checkpoint.commit.removal import set_aside
from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.experience.journal import FOLDER, Journal
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import Transport
from rlhf.storage.files import append_durably, make_dir_durably
from rlhf.storage.layout import POINTER, step_dir
from rlhf.tracking import write_report
from tests.support.checkpoints import PlainRole, make_config, save_steps
from tests.support.power_cut_states import Disk, Tree, states
from tests.support.published import publish
from tests.support.recorded_files import Op, recording
from tests.support.sections import prepare


def record_of(root: Path, work: Callable[[], object]) -> list[Op]:
    with recording(root) as recorder:
        work()
    return recorder.ops


def least(ops: list[Op]) -> Tree:
    """Return the tree if a power cut after `ops` loses everything that is not durable."""
    disk = Disk()
    for op in ops:
        disk.apply(op)
    return disk.tree(lambda change: True, lambda node: node.synced)


def cuts(ops: list[Op]) -> Iterator[Tree]:
    """Yield states that a power cut may leave after each operation."""
    disk = Disk()
    for op in ops:
        disk.apply(op)
        yield from states(disk, 20, random.Random(1))


def pointer_lies(tree: Tree, folder: str) -> bool:
    text = tree.get(f"{folder}/{POINTER}")
    return isinstance(text, bytes) and f"{folder}/{step_dir(Path(), int(text or b'-1')).name}" not in tree


def test_make_dir_durably_syncs_all_new_parents(tmp_path):
    assert least(record_of(tmp_path, lambda: make_dir_durably(tmp_path / "a" / "b"))) == {"a": None, "a/b": None}


def test_make_dir_durably_syncs_a_directory_that_exists_already(tmp_path):
    def work() -> None:
        (tmp_path / "a" / "b").mkdir(parents=True)
        make_dir_durably(tmp_path / "a" / "b")

    assert least(record_of(tmp_path, work)) == {"a": None, "a/b": None}


def test_a_power_cut_after_write_report_leaves_the_report(tmp_path):
    (tmp_path / "resolved.yaml").write_text(to_yaml(Config()))
    tree = least(record_of(tmp_path, lambda: write_report(tmp_path)))
    assert tree.keys() >= {"report", "report/report.json", "report/report.html"}


def test_after_a_power_cut_the_pointer_names_no_set_aside_checkpoint(tmp_path):
    ops = record_of(tmp_path, lambda: set_aside(publish(tmp_path / "run", 2), "damaged"))
    assert not [tree for tree in cuts(ops) if pointer_lies(tree, "run")]


def test_after_a_power_cut_the_pointer_names_no_overwritten_checkpoint(tmp_path):
    config = make_config(tmp_path)
    config.trainer.overwrite = True

    def work() -> None:
        publish(config.run_dir, 2)
        prepare(config)

    name = str(config.run_dir.relative_to(tmp_path))
    assert not [tree for tree in cuts(record_of(tmp_path, work)) if pointer_lies(tree, name)]


def test_a_start_corrects_an_outdated_pointer(tmp_path):
    config = make_config(tmp_path)
    save_steps(config, PlainRole(), 2, 4)
    (config.run_dir / POINTER).write_text("2\n")
    prepare(config)
    assert (config.run_dir / POINTER).read_text() == "4\n"


def test_opening_a_journal_makes_its_unsynced_files_durable(tmp_path):
    def work() -> None:
        (tmp_path / FOLDER).mkdir()
        append_durably(tmp_path / FOLDER / "step_1.rank_00000", [b"x"])

    ops = record_of(tmp_path, work)
    killed = ops[:-1]  # before the sync of the folder
    assert f"{FOLDER}/step_1.rank_00000" not in least([*killed, Op("sync_dir", "")])
    again = record_of(tmp_path, lambda: Journal(tmp_path, "course", "scores", Coordinator(Transport())))
    assert f"{FOLDER}/step_1.rank_00000" in least([*killed, *again, Op("sync_dir", "")])
