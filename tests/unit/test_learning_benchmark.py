"""The learning benchmark detects a policy that does not learn, a clip that never acts, and a useless critic."""

from benchmarks.learning import ROWS, Run, row, settings_of, weakened_policy
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate


def records(last: float, clipped: float = 0.01, explained: float | None = 0.2) -> list[dict]:
    """Four steps, with evaluations before and after."""
    steps = [{"step": step, "actor/pg_loss": 0.0, "actor/pg_clipfrac": clipped} for step in range(1, 5)]
    if explained is not None:
        for record, value in zip(steps, (-3.0, -3.0, explained, explained), strict=True):
            record["critic/explained_variance"] = value
    return [{"step": 0, "val/accuracy": 0.1}, *steps[:3], steps[3] | {"val/accuracy": last}]


def test_what_a_run_must_show():
    for explained in (0.2, None):
        assert list(Run.of(records(0.5, explained=explained)).problems()) == []
    for bad, message in (
        (records(0.29), "gained +19.0 points"),
        (records(0.5, clipped=0.0), "clipped nothing"),
        (records(0.5, explained=0.0), "the critic explains 0.00"),
        (records(0.5, clipped=float("nan")), "clipped nothing"),
    ):
        [problem] = Run.of(bad).problems()
        assert message in problem


def test_a_row_has_the_mean_and_the_spread_over_the_seeds():
    one, two = Run.of(records(0.5)), Run.of(records(0.7, clipped=0.03))
    assert row("ppo", [one]) == "| `ppo` | 10.0 | 50.0 | 40.0 | 1.00 | 0.20 |\n"
    expected = "| `ppo` | 10.0 ± 0.0 | 60.0 ± 14.1 | 50.0 ± 14.1 | 2.00 ± 1.41 | 0.20 ± 0.00 |\n"
    assert row("ppo", [one, two]) == expected


def test_every_row_takes_several_optimizer_steps_per_batch(tmp_path):
    policy = weakened_policy(tmp_path / "policy")
    composed = {name: compose_config([f"model.path={policy}", *settings_of(name)], Library.find(None)) for name in ROWS}
    for name, config in composed.items():
        validate(config, {})
        assert config.data.train_batch_size // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs == 8
        assert (config == composed["grpo"]) == (name == "grpo"), "a variant is not the default"
