"""The benchmark of balancing: the planner stays near the optimum, and the benchmark exits with 1 if it does not."""

import pytest

from benchmarks import balance
from rlhf.learning import balancing


def test_the_planner_balances_few_ranks_and_the_plain_split_does_not(capsys):
    assert balance.main(["--ranks", "8", "32"]) == 0
    for name in balance.DISTRIBUTIONS:
        found = balance.balance(name, 8, 16, 32768)
        assert found.least == pytest.approx(1)
        assert found.planned < 1.02
        assert found.plain > 1.3
    assert "correlated" in capsys.readouterr().out


def test_with_few_samples_per_rank_the_longest_sample_bounds_the_balance():
    found = balance.balance("truncated", 64, 32, 32768)
    assert found.plain is None
    assert 1.05 < found.least <= found.planned < 1.1 * found.least


def test_the_benchmark_exits_with_1_for_a_poor_balance(monkeypatch, capsys):
    """The poor plan gives samples to the ranks in turn, whatever their lengths."""
    turns = lambda lengths, mini_batches, ranks: [row % ranks for row in range(len(lengths))]  # noqa: E731
    monkeypatch.setattr(balance, "balance_samples", turns)
    assert balance.main(["--ranks", "8"]) == 1
    assert "1.15 times the lower bound" in capsys.readouterr().out
    assert balancing.balance_samples is not turns


@pytest.mark.parametrize("name", balance.DISTRIBUTIONS)
def test_generated_lengths_have_the_mean_and_range_of_reasoning_responses(name):
    lengths = balance.DISTRIBUTIONS[name](2000, balance.random.Random(1))
    assert len(lengths) == 2000 * balance.SAMPLES
    assert 2600 < sum(lengths) / len(lengths) < 3400
    assert min(lengths) >= balance.SHORTEST
    assert max(lengths) == balance.LONGEST
