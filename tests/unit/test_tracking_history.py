import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.errors import UserError
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
    history.truncate_after(1)
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
    whole = filled(tmp_path / "whole.jsonl", 10)
    killed = filled(tmp_path / "killed.jsonl", 7)
    killed.truncate_after(4)
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
        history.truncate_after(3)
        assert history.path.read_bytes() == whole[:second_line_ends]


def test_a_missing_file_is_an_empty_history(tmp_path: Path) -> None:
    history = History(tmp_path / "run" / "metrics.jsonl")
    assert history.records() == []
    history.truncate_after(5)
    assert history.path.read_bytes() == b""
    assert [path.name for path in history.path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("damage", [b"{broken", b"[1, 2]", b'{"reward": 1}', b'{"step": "x"}', b"\xff\xfe"])
def test_damage_before_the_end_is_named(tmp_path: Path, damage: bytes) -> None:
    history = filled(tmp_path / "metrics.jsonl", 3)
    first, _, third = history.path.read_bytes().splitlines()
    history.path.write_bytes(b"\n".join([first, damage, third, b""]))
    with pytest.raises(UserError, match=r"metrics.jsonl: line 2 is damaged"):
        history.records()


def test_lines_are_plain_json(tmp_path: Path) -> None:
    history = filled(tmp_path / "metrics.jsonl", 1)
    assert json.loads(history.path.read_text()) == {"step": 1, "reward/mean": 1 / 3}
