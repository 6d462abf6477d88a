import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlhf.config.schema.rollout import ServersConfig
from rlhf.rollout.servers.health import Budget, ServerHealth

LIMITS = ServersConfig(start_timeout_s=100.0, answer_timeout_s=20.0, max_failures=3, backoff_s=1.0, backoff_max_s=6.0)


def make(*, ours: bool = True, needed: bool = True) -> ServerHealth:
    budget = Budget(LIMITS.max_failures)
    budget.needed = needed
    return ServerHealth(LIMITS, budget, ours=ours, now=0.0)


def serving(*, ours: bool = True) -> ServerHealth:
    health = make(ours=ours)
    if ours:
        health.started(0.0)
    health.expect_label("w1")
    health.probing(0.0)
    health.probed(0.0, "default")
    health.pushed(0.0, "w1", None)
    assert health.state == "serving"
    return health


def test_from_the_start_to_the_first_weights():
    health = make()
    assert (health.state, health.due(0.0)) == ("dead", "start")
    health.started(0.0)
    assert (health.state, health.due(0.0)) == ("starting", "probe")
    health.probing(0.0)
    assert health.due(0.5) == "nothing"
    assert health.due(1.0) == "probe"
    health.probed(1.0, "default")
    assert (health.state, health.due(1.0)) == ("stale", "push")
    health.expect_label("w1")
    health.pushed(2.0, "w1", None)
    assert (health.state, health.due(2.0)) == ("serving", "nothing")
    health.expect_label("w2")
    assert (health.state, health.due(2.0)) == ("stale", "push")


def test_a_server_given_by_url_is_never_started():
    health = make(ours=False)
    assert (health.state, health.due(0.0)) == ("starting", "probe")
    for _ in range(LIMITS.max_failures):
        health.failed(0.0, "refused", gone=True)
        assert health.due(LIMITS.backoff_max_s) == "probe"
    health.probing(10.0)
    assert health.overdue(109.0) is None  # this server gets as much time as one that this run starts
    assert "start_timeout_s" in str(health.overdue(110.0))


def test_the_wanted_weights_by_another_name_are_not_served():
    health = serving()
    health.probed(1.0, "default")
    assert health.state == "stale"
    assert "'default'" in health.reasons[-1]
    health.probed(1.0, "w1")
    assert health.state == "serving"


def test_an_answer_by_other_weights_asks_for_a_push_at_once():
    health = serving()
    health.request_sent(1.0)
    health.outdated("an answer by 'default'")
    assert (health.state, health.in_flight, health.due(1.0)) == ("stale", 0, "push")


def test_a_push_for_weights_that_are_no_longer_wanted_does_not_count():
    health = serving()
    health.expect_label("w2")
    health.expect_label("w3")
    health.pushed(1.0, "w2", None)
    assert health.state == "stale"


def test_after_half_a_push_only_a_whole_one_helps():
    health = serving(ours=False)
    health.expect_label("w2")
    health.pushed(1.0, "w2", "connection lost")
    assert health.state == "dead"
    health.probing(5.0)
    health.probed(5.0, "w2")
    assert health.state == "stale"
    health.pushed(6.0, "w2", None)
    assert health.state == "serving"


def test_a_server_that_an_earlier_trainer_left_with_the_wanted_label_is_checked_first():
    """It may be paused, and may have requests of a dead trainer."""
    health = make(ours=False)
    health.expect_label("w1")
    health.probing(0.0)
    health.probed(0.0, "w1")
    assert (health.state, health.label) == ("stale", "w1")
    health.pushed(1.0, "w1", None)
    assert health.state == "serving"


def test_the_label_is_the_one_of_the_last_push_until_an_error_or_another_answer():
    health = serving()
    assert health.label == "w1"
    health.expect_label("w2")
    health.pushed(1.0, "w2", None)
    assert health.label == "w2"
    health.outdated("an answer by 'w1'")
    assert health.label == ""
    health.pushed(2.0, "w2", None)
    health.probed(12.0, "default")
    assert (health.state, health.label) == ("stale", "default")
    health.pushed(13.0, "w2", "connection lost")
    assert health.label == ""


def test_a_process_of_ours_is_asked_again_first_and_then_started_anew():
    health = serving()
    health.failed(10.0, "connection lost")
    assert health.due(10.9) == "nothing"
    assert health.due(11.0) == "probe"
    health.probing(11.0)
    assert "answer_timeout_s" in str(health.overdue(31.0))  # the server was up before, so it gets no time to start
    health.probed(11.0, "w1")
    assert health.state == "serving"
    health.failed(12.0, "connection lost")
    assert health.due(14.0) == "start"
    health.started(14.0)
    assert health.overdue(113.0) is None


def test_a_process_that_is_gone_is_started_anew_at_once_after_the_back_off():
    health = serving()
    health.failed(10.0, "exit code -9", gone=True)
    assert (health.due(10.9), health.due(11.0)) == ("nothing", "start")


def test_a_busy_server_is_alive_as_long_as_it_computes_tokens():
    health = serving()
    health.request_sent(0.0)
    now = 0.0
    for tokens in range(100, 110):
        assert health.due(now) == "count"
        health.counting(now)
        assert health.due(now + 1.9) == "nothing"
        assert health.overdue(now + 4.9) is None
        health.counted(now + 4.9, tokens)
        now += 5.0
    assert health.state == "serving"
    # The last progress is 0.1 s old: its count arrived 4.9 s after the question.
    health.counting(now)
    health.counted(now, 109)
    assert health.overdue(now + 19.8) is None
    assert "hung: 1 requests, and for 20 s no answer and no token" in str(health.overdue(now + 20.0))


def test_the_first_count_and_one_that_stands_still_are_no_progress():
    health = serving()
    health.request_sent(0.0)
    for now in (0.0, 5.0, 10.0, 15.0):
        health.counting(now)
        health.counted(now, 1e9)
    assert health.overdue(19.9) is None
    assert "hung" in str(health.overdue(20.0))
    # A server that somebody else restarted counts from 0 again, which does not mean that it hangs.
    health.counted(20.0, 0)
    assert health.overdue(39.9) is None


def test_a_server_is_hung_if_its_requests_make_no_progress():
    health = serving()
    assert health.overdue(1000.0) is None  # idle
    health.request_sent(1000.0)
    health.request_sent(1015.0)
    assert health.overdue(1019.0) is None
    health.request_finished(1019.0)
    assert health.overdue(1038.0) is None
    assert "hung: 1 requests" in str(health.overdue(1039.0))
    health.request_finished(1039.0)
    assert health.overdue(2000.0) is None


def test_idle_servers_are_probed_for_labels_and_busy_servers_for_token_counts():
    health = serving()
    assert health.due(10.0) == "probe"
    health.probing(10.0)
    assert (health.due(19.0), health.due(20.0)) == ("nothing", "probe")
    health.request_sent(12.0)
    assert health.due(12.0) == "count"
    health.counting(12.0)
    assert (health.due(13.9), health.due(14.0)) == ("nothing", "count")
    health.request_finished(17.0)
    assert (health.due(19.0), health.due(20.0)) == ("nothing", "probe")


def test_the_wait_doubles_up_to_the_longest_and_begins_again_after_a_finished_request():
    health = serving()
    waits = []
    for _ in range(5):
        health.failed(0.0, "lost")
        waits.append(health.backoff_s)
    assert waits == [1.0, 2.0, 4.0, 6.0, 6.0]
    health.request_sent(0.0)
    health.request_finished(0.0)
    health.failed(0.0, "lost")
    assert health.backoff_s == 1.0


@pytest.mark.parametrize("needed", [True, False])
def test_the_failure_budget_is_shared_and_counts_only_while_a_caller_waits(needed):
    budget = Budget(LIMITS.max_failures)
    budget.needed = needed
    two = [ServerHealth(LIMITS, budget, ours=True, now=0.0) for _ in range(2)]
    for number in range(LIMITS.max_failures + 1):
        assert not budget.spent
        two[number % 2].failed(0.0, "lost")
    assert budget.spent is needed
    assert (two[0].due(1000.0) == "give_up") is needed
    two[1].request_sent(0.0)
    two[1].request_finished(0.0)
    assert not budget.spent


class AnyHistory(RuleBasedStateMachine):
    """In any history, requests go only to servers with the wanted weights, and waits and failures are bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.holds, self.wanted, self.updates, self.in_a_row = 0.0, "default", "default", 0, 0
        self.health = make()

    def _failed(self) -> None:
        self.in_a_row += 1

    @rule(seconds=st.floats(0, 200))
    def time_passes(self, seconds):
        self.now += seconds
        if reason := self.health.overdue(self.now):
            self.health.failed(self.now, reason, gone=True)
            self._failed()

    @rule()
    def do_what_is_due(self):
        due = self.health.due(self.now)
        if due == "start":
            self.holds = "default"
            self.health.started(self.now)
        elif due == "probe":
            self.health.probing(self.now)
            if self.health.state == "serving" and self.holds != self.wanted:
                self._failed()
            self.health.probed(self.now, self.holds)
        elif due == "push":
            self.holds = self.wanted
            self.health.pushed(self.now, self.wanted, None)

    @precondition(lambda self: self.health.state == "stale")
    @rule(reached=st.booleans())
    def a_push_fails(self, reached):
        self.holds = self.wanted if reached else self.holds
        self.health.pushed(self.now, self.wanted, "lost")
        self._failed()

    @rule()
    def new_weights(self):
        self.updates += 1
        self.wanted = f"w{self.updates}"
        self.health.expect_label(self.wanted)

    @precondition(lambda self: self.health.state == "serving")
    @rule()
    def restarted_behind_our_back(self):
        self.holds = "default"
        self.health.request_sent(self.now)
        self.health.outdated("an answer by 'default'")
        self._failed()

    @precondition(lambda self: self.health.state == "serving")
    @rule()
    def a_request(self):
        assert self.holds == self.wanted
        self.health.request_sent(self.now)
        self.health.request_finished(self.now)
        self.in_a_row = 0

    @precondition(lambda self: self.health.state != "dead")
    @rule(gone=st.booleans())
    def it_fails(self, gone):
        self.health.failed(self.now, "lost", gone=gone)
        self._failed()

    @invariant()
    def serves_the_wanted_weights_only(self):
        assert self.health.state != "serving" or self.holds == self.wanted

    @invariant()
    def never_waits_for_longer_than_the_settings_say(self):
        assert self.health.backoff_s <= LIMITS.backoff_max_s
        if self.health.state == "dead":
            assert self.health.due(self.now + LIMITS.backoff_max_s) != "nothing"

    @invariant()
    def gives_up_when_the_budget_is_spent_and_not_before(self):
        assert (self.health.due(self.now) == "give_up") is (self.in_a_row > LIMITS.max_failures)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
