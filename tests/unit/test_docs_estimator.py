"""docs/algorithms.md: the table of an estimator's input has exactly the fields of `EstimatorInput`."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import rlhf
from rlhf.algorithms.advantages import EstimatorInput

PAGE = (Path(rlhf.__file__).parents[1] / "docs/algorithms.md").read_text()


def test_the_table_has_every_field_of_the_input() -> None:
    _, _, table = PAGE.partition("| `EstimatorInput` |")
    named = re.findall(r"^\| `(\w+)` \|", table.partition("\n\n")[0], flags=re.M)
    properties = [name for name, _ in inspect.getmembers(EstimatorInput, lambda member: isinstance(member, property))]
    assert named == [field.name for field in fields(EstimatorInput)] + properties
