"""Follower of metrics.jsonl: it returns each record once, and after a cut of the file the records written since.

This holds even if the file soon grows past the cut.
"""

from pathlib import Path

from rlhf.tracking.history import History
from rlhf.tracking.history_follower import TAIL_BYTES, HistoryFollower


def written(path: Path, first: int, last: int, value: float = 0.0) -> History:
    history = History(path)
    for step in range(first, last + 1):
        history.append({"step": step, "reward/mean": value})
    return history


def steps(follower: HistoryFollower) -> list[int]:
    return [record["step"] for record in follower.new()]


def test_a_follower_returns_only_records_written_after_its_creation(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, 0, 3)
    follower = HistoryFollower(path)
    assert steps(follower) == []
    written(path, 4, 5)
    assert steps(follower) == [4, 5]
    assert steps(follower) == []


def test_a_file_that_is_not_there_yet_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = HistoryFollower(path)
    assert steps(follower) == []
    written(path, 0, 1)
    with path.open("a") as file:
        file.write('{"step": 2, "re')
    assert steps(follower) == [0, 1]
    with path.open("a") as file:
        file.write('ward/mean": 0.0}\n')
    assert steps(follower) == [2]


def test_a_truncation_is_noticed_while_the_file_is_shorter(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = HistoryFollower(path)
    history = written(path, 0, 6)
    assert steps(follower) == list(range(7))
    history.cut_after(4)
    assert steps(follower) == []
    written(path, 5, 7)
    assert steps(follower) == [5, 6, 7]


def test_a_truncation_is_noticed_after_the_file_has_grown_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    history = written(path, 0, 2)
    follower = HistoryFollower(path)
    written(path, 3, 6)
    assert steps(follower) == [3, 4, 5, 6]
    history.cut_after(1)
    written(path, 2, 9, value=0.5)
    assert steps(follower) == list(range(2, 10))


def test_only_the_end_of_a_long_history_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = b'{"step": %d, "reward/mean": 0.0}\n'
    path.write_bytes(b"".join(line % step for step in range(2 * TAIL_BYTES // len(line))))
    follower = HistoryFollower(path)
    assert len(follower._known) < 1.1 * TAIL_BYTES / len(line)
    written(path, 100_000, 100_000)
    assert steps(follower) == [100_000]


def test_a_history_that_is_removed_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, 0, 3)
    follower = HistoryFollower(path)
    path.unlink()
    assert steps(follower) == []
    written(path, 0, 1)
    assert steps(follower) == [0, 1]
