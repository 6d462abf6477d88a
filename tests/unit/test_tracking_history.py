import json
import math
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.errors import UserError
from rlhf.storage.history_file import HistoryMark
from rlhf.tracking import History


def filled(path: Path, last: int) -> History:
    history = History(path)
    for step in range(1, last + 1):
        history.append({"step": step, "reward/mean": step / 3})
    return history


@settings(max_examples=50, deadline=None)
@given(value=st.floats() | st.integers())
def test_numbers_round_trip_exactly(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    history = History(tmp_path_factory.mktemp("history") / "metrics.jsonl")
    history.append({"step": 1, "x": value})
    (record,) = history.records()
    if isinstance(value, float) and math.isnan(value):
        assert math.isnan(record["x"])
    else:
        assert record["x"] == value
        assert math.copysign(1, record["x"]) == math.copysign(1, value)
        assert type(record["x"]) is type(value)


def test_not_finite_values_survive_truncation(tmp_path: Path) -> None:
    history = History(tmp_path / "metrics.jsonl")
    history.append({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf})
    history.cut_after(1)
    (record,) = history.records()
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_a_value_that_json_lacks_writes_nothing(tmp_path: Path) -> None:
    history = filled(tmp_path / "metrics.jsonl", 2)
    before = history.path.read_bytes()
    with pytest.raises(TypeError):
        history.append({"step": 3, "x": object()})
    assert history.path.read_bytes() == before


def test_resumed_history_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    # Promise 17.
    whole = filled(tmp_path / "whole.jsonl", 10)
    killed = filled(tmp_path / "killed.jsonl", 7)
    killed.cut_after(4)
    for step in range(5, 11):
        killed.append({"step": step, "reward/mean": step / 3})
    assert killed.path.read_bytes() == whole.path.read_bytes()


def test_every_torn_tail_is_dropped(tmp_path: Path) -> None:
    history = filled(tmp_path / "metrics.jsonl", 3)
    whole = history.path.read_bytes()
    second_line_ends = len(b"".join(whole.splitlines(keepends=True)[:2]))
    for cut in range(second_line_ends, len(whole)):
        history.path.write_bytes(whole[:cut])
        assert [record["step"] for record in history.records()] == [1, 2]
        history.cut_after(3)
        assert history.path.read_bytes() == whole[:second_line_ends]


def test_a_missing_file_is_an_empty_history(tmp_path: Path) -> None:
    history = History(tmp_path / "run" / "metrics.jsonl")
    assert list(history.records()) == []
    history.cut_after(5)
    assert not history.path.exists()
    history.append({"step": 6})
    assert list(history.records()) == [{"step": 6}]


@pytest.mark.parametrize("damage", [b"{broken", b"[1, 2]", b'{"reward": 1}', b'{"step": "x"}', b"\xff\xfe"])
def test_damage_before_the_end_is_named(tmp_path: Path, damage: bytes) -> None:
    history = filled(tmp_path / "metrics.jsonl", 3)
    first, _, third = history.path.read_bytes().splitlines()
    history.path.write_bytes(b"\n".join([first, damage, third, b""]))
    with pytest.raises(UserError, match=r"metrics.jsonl: line 2 is damaged"):
        list(history.records())


def test_lines_are_plain_json(tmp_path: Path) -> None:
    history = filled(tmp_path / "metrics.jsonl", 1)
    assert json.loads(history.path.read_text()) == {"step": 1, "reward/mean": 1 / 3}


def long_history(path: Path, last: int) -> History:
    path.write_text("".join(json.dumps({"step": step, "reward/mean": step / 3}) + "\n" for step in range(1, last + 1)))
    return History(path)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_cut_at_a_mark_reads_none_of_the_records(tmp_path: Path) -> None:
    history = long_history(tmp_path / "metrics.jsonl", 100_000)
    mark = HistoryMark.at_end(history.path)
    whole = history.path.read_bytes()
    history.append({"step": 100_001, "reward/mean": 0.5})
    tracemalloc.start()
    before = bytes_read()
    history.cut_after(100_000, mark)
    read, (_, peak) = bytes_read() - before, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert history.path.read_bytes() == whole
    assert read < 64 << 10
    assert peak < 1 << 20


def test_all_readers_need_little_memory(tmp_path: Path) -> None:
    history = long_history(tmp_path / "metrics.jsonl", 20_000)
    size = history.path.stat().st_size
    tracemalloc.start()
    assert sum(1 for _ in history.records()) == 20_000
    history.cut_after(19_999)
    assert sum(1 for _ in history.steps()) == 19_999
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 4


def test_a_mark_of_another_file_is_not_used_for_truncation(tmp_path: Path) -> None:
    """If the file is an older copy, another run's, edited, or gone, the records' steps decide where to cut."""
    ours = filled(tmp_path / "ours.jsonl", 6)
    mark = HistoryMark.at_end(ours.path)
    shorter, edited, other = (
        filled(tmp_path / f"{name}.jsonl", last) for name, last in zip("abc", (4, 9, 9), strict=True)
    )
    edited.path.write_bytes(edited.path.read_bytes().replace(b'"step": 6,', b'"step": 6 ,'))
    other.path.write_bytes(other.path.read_bytes().replace(b"reward", b"Reward"))
    for history, left in ((shorter, 4), (edited, 6), (other, 6), (History(tmp_path / "none.jsonl"), 0)):
        assert not mark.fits(history.path)
        history.cut_after(6, mark)
        assert list(history.steps()) == list(range(1, left + 1))


def test_records_from_a_step_on(tmp_path: Path) -> None:
    history = filled(tmp_path / "metrics.jsonl", 5)
    assert [record["step"] for record in history.records(first=4)] == [4, 5]
