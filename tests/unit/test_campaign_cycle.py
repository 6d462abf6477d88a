"""`campaign --hours` runs each kind for each profile, then again with the next seed, and stops at the first problem."""

from pathlib import Path

import pytest

from tests.faults.cycle import Cycle


def run(folder: Path, hours: float, failing: tuple[str, str, int] | None = None) -> tuple[list, list[str], list[str]]:
    """Return the campaigns that ran, the problems and the lines of the report."""
    ran: list = []
    lines: list[str] = []

    def campaign(name: str, kind: str):
        def start(own: Path, seed: int) -> list[str]:
            assert own.is_dir()
            ran.append((name, kind, seed))
            if len(ran) == 20:
                raise KeyboardInterrupt
            return ["the weights differ"] if (name, kind, seed) == failing else []

        return start

    campaigns = {name: {kind: campaign(name, kind) for kind in ("named", "random")} for name in ("a", "b", "c")}
    cycle = Cycle(campaigns, {"c": ["no_such_package"]}, lines.append)
    problems = cycle.run(folder, hours, 7)
    assert cycle.covered("a", "named") == [seed for name, kind, seed in ran if (name, kind) == ("a", "named")]
    return ran, problems, lines


def test_all_pairs_run_with_a_seed_before_the_next(tmp_path):
    failing = ("b", "random", 8)
    ran, problems, lines = run(tmp_path, 1, failing)
    once = [("a", "named"), ("b", "named"), ("a", "random"), ("b", "random")]
    assert ran == [(*pair, seed) for seed in (7, 8) for pair in once]
    assert problems == [f"b, random, seed 8, in {tmp_path / 'b-random-8'}: the weights differ"]
    assert lines[0] == "c: skipped, because no_such_package cannot be imported"
    assert [path.name for path in tmp_path.iterdir()] == ["b-random-8"], "only the failed campaign's folder stays"


@pytest.mark.parametrize("hours", [0.0, -1.0])
def test_no_campaign_starts_after_the_time(tmp_path, hours):
    ran, problems, _ = run(tmp_path, hours)
    assert (ran, problems) == ([], [])
