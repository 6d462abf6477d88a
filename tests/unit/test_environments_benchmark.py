"""The benchmark of episodes: its ideal and its simulated loops have known times, and it plays real episodes."""

from importlib.util import find_spec

import pytest

from benchmarks.environments import ENGINES, TOOL, BenchmarkCase, Work, call, ends, main, measured
from rlhf.config.schema.env import EnvConfig


def test_samples_begin_in_order_once_a_slot_is_free():
    assert ends([3, 1, 2, 1], slots=2) == [3, 1, 3, 4]
    assert ends([2], slots=8) == [2]


def test_the_ideal_is_a_busy_engine_or_the_longest_episode():
    work = Work([[4, 4], [4, 4]], slots=1, token_s=1.0, tool_s=0.5)
    assert work.ideal_s == 16.0
    assert work.turn_by_turn_s(gathered=False) == 17.0
    assert work.turn_by_turn_s(gathered=True) == 16.5
    assert Work([[4, 4], [1, 1]], slots=2, token_s=1.0, tool_s=0.5).ideal_s == 8.5


def test_skewed_turns_have_the_mean_of_equal_turns():
    means = []
    for lengths in ("equal", "skewed"):
        work = Work.of(lengths, 512, 8, slots=1, token_s=1.0, tool_s=0.0)
        means.append(work.ideal_s / 512 / 8)
    assert means == pytest.approx([64, 64], rel=0.1)


@pytest.mark.parametrize("engine", ENGINES)
def test_real_episodes_take_at_least_the_ideal(engine):
    work = Work.of("skewed", 12, 3, slots=6, token_s=1e-3, tool_s=5e-3)
    found = measured(
        BenchmarkCase(engine, "skewed", work), EnvConfig([TOOL], {"tool_ms": 5.0}, max_turns=3), call, True
    )
    assert found["time over ideal"] >= 1.0
    assert found["rank, ms per turn"] > 0


def test_a_missing_package_is_one_message(capsys):
    if find_spec("textarena") is not None:
        pytest.skip("textarena is installed")
    assert main(["--textarena", "--rounds", "1"]) == 2
    assert "pip install 'rlhf[textarena]'" in capsys.readouterr().err
