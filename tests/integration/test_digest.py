"""The first three steps of the offline recipe have known bits, recorded from earlier code.

A change of the code, or a release of transformers or reasoning-gym, that alters bits fails here in seconds. Known bits
belong to a processor's kernels (`place`). Parts that no kernel affects have the same bits on every
processor, and metrics agree within the rounding of their sums. The test compares both on processors without known
bits, too.
"""

from pathlib import Path

import pytest

from tests.support.compare_runs import history
from tests.support.digests import digests_of_run, known, known_everywhere, place
from tests.support.rounding import sum_bound

# Metrics of each step. The mean reward is exact, because the tokens are the same.
FIGURES = [
    {"reward/mean": 0.609375, "actor/grad_norm": 0.48137226700782776, "actor/entropy": 0.10894154012203217},
    {"reward/mean": 0.578125, "actor/grad_norm": 0.6065880656242371, "actor/entropy": 0.13103950396180153},
    {"reward/mean": 0.599609375, "actor/grad_norm": 0.5947421193122864, "actor/entropy": 0.1381613165140152},
]
TOKENS = 12_500
"""Tokens of a step, prompts included: the number of terms of a weight's gradient."""


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
