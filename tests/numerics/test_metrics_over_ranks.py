"""Tests that metrics merged over two real ranks equal metrics over all values, even if a rank lacks a name."""

import pytest

from rlhf.experience.metrics import Summary, merge
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from tests.support.numeric_ranks import run_ranks

VALUES = [
    {"shared": [1.0, 4.0], "first": [2.0], "nowhere": []},
    {"shared": [10.0], "second": [5.0, 6.0], "nowhere": []},
]


def merged() -> dict[str, tuple[int, float, float, float, float]]:
    coordinator = Coordinator(GlooTransport())
    mine = {name: Summary.of(values) for name, values in VALUES[coordinator.rank].items()}
    every = merge(mine, coordinator)
    return {name: (s.count, s.mean, s.std, s.low, s.high) for name, s in every.items()}


def test_merge():
    first, second = run_ranks(2, merged)
    assert first == second
    assert list(first) == ["first", "second", "shared"]
    assert first["first"] == (1, 2.0, 0.0, 2.0, 2.0)
    assert first["second"] == (2, 5.5, 0.5, 5.0, 6.0)
    assert first["shared"] == pytest.approx((3, 5.0, 14**0.5, 1.0, 10.0))
