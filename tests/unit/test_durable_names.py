"""Names of files and directories that a power cut must leave."""

from collections.abc import Callable
from pathlib import Path

from rlhf.experience.journal import FOLDER, Journal
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import LoneTransport
from rlhf.storage.files import append_durably, make_dir_durably
from rlhf.tracking.report import write_report
from tests.support.power_cut_states import Disk, Tree
from tests.support.recorded_files import Op, recording


def record_of(root: Path, work: Callable[[], object]) -> list[Op]:
    with recording(root) as recorder:
        work()
    return recorder.ops


def least(ops: list[Op]) -> Tree:
    """What a power cut after `ops` leaves at least."""
    disk = Disk()
    for op in ops:
        disk.apply(op)
    return disk.tree(lambda change: True, lambda node: node.synced)


def test_a_new_directory_has_the_names_of_all_its_parents(tmp_path):
    assert least(record_of(tmp_path, lambda: make_dir_durably(tmp_path / "a" / "b"))) == {"a": None, "a/b": None}


def test_a_directory_that_another_has_made_is_durable_all_the_same(tmp_path):
    def work() -> None:
        (tmp_path / "a" / "b").mkdir(parents=True)
        make_dir_durably(tmp_path / "a" / "b")

    assert least(record_of(tmp_path, work)) == {"a": None, "a/b": None}


def test_a_report_is_there_once_it_is_told(tmp_path):
    tree = least(record_of(tmp_path, lambda: write_report(tmp_path)))
    assert tree.keys() == {"report", "report/report.json", "report/reward.png"}


def test_a_journal_that_is_read_after_a_kill_stays(tmp_path):
    def work() -> None:
        (tmp_path / FOLDER).mkdir()
        append_durably(tmp_path / FOLDER / "step_1.rank_00000", b"x")

    ops = record_of(tmp_path, work)
    killed = ops[:-1]  # before the sync of the folder
    assert f"{FOLDER}/step_1.rank_00000" not in least([*killed, Op("sync_dir", "")])
    again = record_of(tmp_path, lambda: Journal(tmp_path, "course", "scores", Coordinator(LoneTransport())))
    assert f"{FOLDER}/step_1.rank_00000" in least([*killed, *again, Op("sync_dir", "")])
