import json
import threading
import time
from pathlib import Path

import pytest

from rlhf.launch.evidence import AttemptResult, first_cause
from rlhf.launch.interface import RankExit
from rlhf.launch.local.processes import RankProcesses
from rlhf.ranks.status import SCORED, SCORES, SCORES_EARLY, RankError, StatusWriter, clear_statuses, read_statuses
from tests.support.refusals import says, user_error


def test_events_and_errors_come_back(tmp_path):
    zero, one = StatusWriter(tmp_path, 0), StatusWriter(tmp_path, 1)
    zero.event(3, "rollout.before")
    one.event(4, "commit.rename")
    one.error("crash", "boom", "Traceback ...")
    statuses = read_statuses(tmp_path)
    assert (statuses[0].step, statuses[0].event, statuses[0].error) == (3, "rollout.before", None)
    assert (statuses[1].step, statuses[1].event) == (4, "commit.rename")
    assert statuses[1].error == RankError("crash", "boom", "Traceback ...")
    assert sorted(json.loads((tmp_path / "status/rank_1.json").read_text())) == [
        "error",
        "event",
        "phase",
        "save",
        "step",
        "thread",
        "time",
    ]
    assert sorted(p.name for p in (tmp_path / "status").glob("rank_*")) == ["rank_0.json", "rank_1.json"]


def test_a_rank_shows_up_from_its_start_and_is_forgotten_on_request(tmp_path):
    StatusWriter(tmp_path, 12)
    assert read_statuses(tmp_path)[12].step is None
    clear_statuses(tmp_path)
    assert read_statuses(tmp_path) == {}


def test_a_shorter_record_replaces_a_longer_one_whole(tmp_path):
    writer = StatusWriter(tmp_path, 0)
    writer.event(1000, "a.long.name.of.an.event")
    writer.event(1, "a")
    assert (read_statuses(tmp_path)[0].step, read_statuses(tmp_path)[0].event) == (1, "a")


@pytest.mark.parametrize(("message", "kept"), [("short", 5), ("x" * 3000, 3000), ("ü" * 3000, None)])
def test_a_long_error_is_cut_to_the_page_and_keeps_what_matters(tmp_path, message, kept):
    writer = StatusWriter(tmp_path, 0)
    writer.error("crash", message, "first line\n" + "middle\n" * 2000 + "last line\n")
    error = read_statuses(tmp_path)[0].error
    assert (tmp_path / "status/rank_0.json").stat().st_size == 4096
    assert message.startswith(error.message)
    assert "first line" not in error.traceback
    if kept is None:
        assert len(error.message) > 100
    else:
        assert len(error.message) == kept
        assert error.traceback.endswith("middle\nlast line\n")


def test_samples_scored_by_another_thread_count_as_progress_of_the_loop(tmp_path):
    writer = StatusWriter(tmp_path, 0)
    writer.event(3, SCORES)
    before = read_statuses(tmp_path)[0]

    def score(event: str) -> None:
        time.sleep(0.15)
        writer.event(3, event)

    for event, moves in (("reward.other", False), (SCORED, True), ("reward.wait", True)):
        thread = threading.Thread(target=score, args=[event])
        thread.start()
        thread.join()
        after = read_statuses(tmp_path)[0]
        assert (after.event, after.time > before.time) == (SCORES, moves)
        before = after
    # While the loop generates or trains, such threads work beside it. Otherwise the watchdog would learn from their
    # events that a generation takes seconds, and kill the next long one.
    for of_loop in ("rollout.before", SCORES_EARLY, "update.mid"):
        writer.event(3, of_loop)
        before = read_statuses(tmp_path)[0]
        assert before.event != SCORES_EARLY
        thread = threading.Thread(target=score, args=[SCORED])
        thread.start()
        thread.join()
        assert read_statuses(tmp_path)[0] == before


def test_a_clock_that_is_set_back_neither_silences_a_rank_nor_changes_the_order_of_errors(tmp_path, monkeypatch):
    wall = time.time()
    monkeypatch.setattr("rlhf.ranks.status.time.time", lambda: wall)
    zero, one = StatusWriter(tmp_path, 0), StatusWriter(tmp_path, 1)
    zero.event(3, "rollout.wait")
    one.error("crash", "the first")
    wall -= 3600
    zero.error("crash", "follows")
    died = AttemptResult({0: RankExit(1), 1: RankExit(1)}, first=(0, 1), killed=frozenset())
    assert first_cause(died, read_statuses(tmp_path)) == 1
    before = read_statuses(tmp_path)[0].time
    time.sleep(0.15)
    zero.event(3, "rollout.wait")
    assert read_statuses(tmp_path)[0].time > before


@pytest.mark.parametrize("content", ["{}", "[1]", '{"error": null, "save": null, "rank": 0}'])
def test_a_status_that_no_rank_writes_is_named_with_a_remedy(tmp_path, content):
    clear_statuses(tmp_path)
    path = tmp_path / "status" / "rank_0.json"
    path.parent.mkdir()
    path.write_text(content)
    says(user_error(read_statuses, tmp_path), str(path), "damaged", "Remove the file")


def test_a_watchdog_reads_the_files_of_its_own_ranks_only(tmp_path, monkeypatch):
    """In a shared folder, the watchdogs of 128 nodes with 8 ranks each once read all 1,024 files at each look."""
    for rank in range(4):
        StatusWriter(tmp_path, rank).event(1, "update.mid")
    read, read_text = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read.append(path.name) or read_text(path))
    assert list(RankProcesses({1: 0, 3: 0, 9: 0}, tmp_path).statuses()) == [1, 3]
    assert "rank_0.json" not in read
    assert "rank_2.json" not in read
