from rlhf.config import TrainerConfig
from rlhf.launch.restart_policy import GiveUp, Restart, RestartPolicy


def policy(**settings) -> RestartPolicy:
    defaults = {"max_restarts": 3, "restart_backoff_s": 0.1, "restart_backoff_max_s": 5.0, "max_failures_per_step": 3}
    return RestartPolicy(TrainerConfig(**(defaults | settings)))


def test_backoff_grows_tenfold_up_to_the_cap():
    p = policy(max_restarts=10, max_failures_per_step=100)
    assert [p.crashed(7) for _ in range(5)] == [Restart(n, w) for n, w in enumerate((0.1, 1.0, 5.0, 5.0, 5.0), start=1)]


def test_budget_is_spent_when_the_run_does_not_get_past_the_furthest_crash():
    p = policy()
    assert [p.crashed(step) for step in (9, 8, 9)] == [Restart(1, 0.1), Restart(2, 1.0), Restart(3, 5.0)]
    end = p.crashed(8)
    assert isinstance(end, GiveUp)
    assert "trainer.max_restarts=3" in end.reason


def test_progress_renews_budget_and_backoff():
    p = policy()
    assert [p.crashed(step) for step in (9, 9, 10, 11)] == [
        Restart(1, 0.1),
        Restart(2, 1.0),
        Restart(1, 0.1),
        Restart(1, 0.1),
    ]


def test_crash_loop_at_one_step_ends_the_run():
    p = policy(max_restarts=100)
    assert isinstance(p.crashed(4), Restart)
    assert isinstance(p.crashed(4), Restart)
    end = p.crashed(4)
    assert isinstance(end, GiveUp)
    assert "at step 4: 3 (trainer.max_failures_per_step=3)" in end.reason


def test_a_crash_at_another_step_resets_the_count_of_a_crash_loop():
    p = policy(max_restarts=100)
    assert all(isinstance(p.crashed(step), Restart) for step in (4, 4, 3, 4, 4))
    assert isinstance(p.crashed(4), GiveUp)


def test_crashes_before_the_first_step_are_a_loop_too():
    p = policy()
    p.crashed(None)
    p.crashed(None)
    end = p.crashed(None)
    assert isinstance(end, GiveUp)
    assert "before the first step" in end.reason


def test_no_restarts_allowed():
    assert isinstance(policy(max_restarts=0).crashed(1), GiveUp)


def test_backoff_of_thousands_of_crashes_does_not_overflow():
    p = policy(max_restarts=5000, max_failures_per_step=5000)
    assert [p.crashed(1) for _ in range(2000)][-1] == Restart(2000, 5.0)


def test_the_second_crash_in_a_row_with_one_cause():
    p = policy()
    assert [p.is_second(cause) for cause in "aabaaa"] == [False, True, False, False, True, False]
