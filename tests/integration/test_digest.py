"""The first three steps of the offline recipe have the bits that the tree before a change had.

A change of the code that alters bits shows here in seconds; so does a release of transformers or reasoning-gym that
alters them. Known bits are those of a processor's kernels (`place`). What no kernel decides is the same on every
processor, and figures are within the rounding of their sums: the test compares both on processors without known bits,
too.
"""

from pathlib import Path

import pytest

from tests.support.compare_runs import history
from tests.support.digests import digests_of_run, known, known_everywhere, place
from tests.support.rounding import sum_bound

# Of each step; the mean reward is that of the same tokens, and exact.
FIGURES = [
    {"reward/mean": 0.609375, "actor/grad_norm": 0.48137226700782776, "actor/entropy": 0.10894154012203217},
    {"reward/mean": 0.578125, "actor/grad_norm": 0.6065880656242371, "actor/entropy": 0.13103950396180153},
    {"reward/mean": 0.599609375, "actor/grad_norm": 0.5947421193122864, "actor/entropy": 0.1381613165140152},
]
TOKENS = 12_500
"""Of a step, prompts included: terms of a weight's gradient."""


def test_three_steps_of_the_offline_recipe_have_the_known_bits(tmp_path: Path):
    found = digests_of_run("offline_3", tmp_path)
    everywhere = known_everywhere("offline_3")
    assert {"driver_state", "actor/extra", "rng"} <= everywhere.keys()
    assert {part: found[part] for part in everywhere} == everywhere
    for record, expected in zip(history(tmp_path / "rlhf" / "offline_3"), FIGURES, strict=True):
        assert record["reward/mean"] == expected["reward/mean"]
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=sum_bound(TOKENS))
    if (expected_here := known(place())) is not None:
        assert {part: found[part] for part in expected_here["offline_3"]} == expected_here["offline_3"]
