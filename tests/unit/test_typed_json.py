"""Values of rows that JSON lacks, on their way to reward functions and environments."""

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import pandas
import pytest

from rlhf import typed_json
from rlhf.environments.agent_program import _row_text
from rlhf.environments.saved_state import restore, saved
from rlhf.reward.scores import RewardItem
from rlhf.reward.verifiers import exact_match

VALUES = [
    datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    datetime(2020, 1, 2),
    date(2020, 1, 2),
    time(3, 4, 5),
    timedelta(days=-1, microseconds=7),
    Decimal("1.50"),
    b"\x01\xff",
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_arrives_with_its_type(value) -> None:
    """Bytes arrived as the text of their literal, so a function that decodes them scored wrong."""
    row = {"column": [value, {"inside": value}], "text": str(value)}
    found = typed_json.loads(typed_json.dumps(row))
    assert found == row
    assert type(found["column"][0]) is type(value)


@pytest.mark.parametrize("kind", ["bytes", "datetime", "decimal", "timedelta", "other", 3])
def test_a_dict_of_the_row_that_looks_like_an_encoded_value_stays(kind) -> None:
    """A saved state with such a dict was restored as a decimal: the resumed run had other rewards."""
    row = {"__type__": kind, "value": "1.50"}
    nested = {"value": [row, {"more": row | {"third": [row]}}], "numbers": {1: 2}}
    assert typed_json.loads(typed_json.dumps(nested)) == nested | {"numbers": {"1": 2}}


def test_no_time_of_pandas_is_none() -> None:
    assert typed_json.loads(typed_json.dumps([pandas.NaT, pandas.Timestamp("2020-01-02")])) == [
        None,
        datetime(2020, 1, 2),
    ]


def test_a_state_may_have_the_values_of_its_row() -> None:
    class Owner:
        def __init__(self, row: object) -> None:
            self.row = row

        def state_dict(self) -> object:
            return self.row

        def load_state_dict(self, state: object) -> None:
            self.row = state

    one, other = Owner({"day": VALUES, "odd": {"__type__": "decimal", "value": "1"}}), Owner(None)
    restore(other, json.loads(json.dumps(saved(one))))
    assert other.row == one.row


def test_a_program_reads_typed_values_as_texts() -> None:
    row = typed_json.loads(typed_json.dumps({"values": VALUES, "nan": float("nan")}))
    assert json.loads(_row_text(row)) == {"values": [str(value) for value in VALUES], "nan": None}


@pytest.mark.parametrize(("answer", "response"), [(42.0, "42"), (42.0, "42.0"), (0.5, "0.5"), ([1.0, 2.0], "2")])
def test_a_whole_number_that_a_table_stores_as_a_float_is_that_number(answer, response) -> None:
    assert exact_match(RewardItem("s", response, answer, {})).score == 1.0
    assert exact_match(RewardItem("s", "41", answer, {})).score == 0.0
