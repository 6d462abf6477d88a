"""Tests which server generates which sample, and how many at once; servers and clock are simulated."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scripted_servers import ScriptedServer, ServerSpeed, generate
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.servers.dispatch import Concurrency, SampleQueue, ServerLoad
from rlhf.rollout.servers.fleet_loop import ServersFailed


def load(running: int, waiting: int = 0) -> ServerLoad:
    return ServerLoad(0.0, running, waiting)


def at_limit(start: int) -> Concurrency:
    made = Concurrency(start)
    for _ in range(start):
        made.sent()
    return made


def turn_over(concurrency: Concurrency) -> None:
    for _ in range(concurrency.limit):
        concurrency.finished()
        concurrency.sent()


def test_a_limit_grows_only_after_as_many_samples_have_finished_at_it():
    server = at_limit(16)
    server.reported(load(16))
    assert server.limit == 16
    turn_over(server)
    server.reported(load(16))
    assert server.limit == 18
    server.reported(load(16))
    assert server.limit == 18


def test_a_limit_that_is_not_reached_does_not_grow():
    server = Concurrency(16)
    for _ in range(100):
        server.sent()
        server.finished()
    server.reported(load(1))
    assert server.limit == 16


def test_samples_that_wait_in_two_reports_lower_the_limit_to_the_slots_and_a_small_queue():
    server = at_limit(256)
    server.reported(load(64, waiting=192))
    assert server.limit == 256
    server.reported(load(64, waiting=192))
    assert server.limit == 72


def drain(queue: SampleQueue, servers: str) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {server: [] for server in servers}
    while queue:
        for server in servers:
            if queue:
                got[server].append(queue.pop(server))
    return got


def test_siblings_go_to_one_server_until_no_other_group_is_left():
    got = drain(SampleQueue([range(0, 4), range(4, 8), range(8, 12)]), "ab")
    assert got == {"a": [0, 1, 2, 3, 8, 9], "b": [4, 5, 6, 7, 11, 10]}


def test_lost_samples_and_their_siblings_are_next():
    queue = SampleQueue([range(0, 3), range(3, 6), range(6, 9)])
    lost = [queue.pop("a"), queue.pop("a")]
    queue.put_back("a", lost)
    assert [queue.pop("b") for _ in range(9)] == list(range(9))
    assert not queue


@given(
    st.lists(st.integers(1, 5), max_size=8),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60),
)
def test_every_sample_is_generated_once_whatever_is_lost(sizes, events):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    queue = SampleQueue([range(end - size, end) for size, end in zip(sizes, ends, strict=True)])
    in_flight: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for server, fails in events:
        if fails:
            queue.put_back(server, in_flight[server])
            in_flight[server] = []
        elif queue:
            in_flight[server].append(queue.pop(server))
    rest = drain(queue, "abc")
    everything = [index for of in (in_flight, rest) for indices in of.values() for index in indices]
    assert sorted(everything) == list(range(sum(sizes)))


def groups_of(groups: int, n: int) -> list[Request]:
    params = SamplingParams(max_tokens=100_000)
    return [Request(uid, [uid] * 8, params, i) for uid in range(groups) for i in range(n)]


def test_slots_stay_busy_until_the_queue_is_dry():
    """Each group has one long sample. Dispatch of whole groups would idle three of four slots until it ends."""
    numbers = count()
    speed = ServerSpeed(slots=8, per_sample_s=0.0)
    server = ScriptedServer(speed, lambda body: 400 if next(numbers) % 4 == 0 else 10)
    made = generate([server], groups_of(32, 4), capacity=8)
    assert [(s.uid, s.sample) for s in made.samples] == [(uid, i) for uid in range(32) for i in range(4)]
    ideal = sum(map(len, made.samples)) * speed.base_s / speed.slots
    assert made.seconds < 1.25 * ideal
    assert server.prefills == 32
    assert made.metrics["perf/requests_repeated"] == 0


def test_a_server_with_fewer_slots_than_assumed_keeps_only_a_small_queue():
    """The client assumes 64 samples at once on both servers; one decodes 4 at a time."""
    few, many = (
        ScriptedServer(ServerSpeed(slots=slots, base_s=0.2, per_sample_s=0.0), lambda body: 50) for slots in (4, 64)
    )
    made = generate([few, many], groups_of(64, 8), capacity=64)
    assert made.seconds < 1.5 * sum(map(len, made.samples)) * few.speed.base_s / (4 + 64)


def test_a_token_a_second_for_twenty_minutes_is_alive():
    server = ScriptedServer(ServerSpeed(base_s=1.0), lambda body: 1200)
    made = generate([server], groups_of(1, 1), capacity=64)
    assert made.seconds >= 1200
    assert made.metrics["perf/server_failures"] == 0
    assert len(made.samples[0]) == 1200


def test_a_server_that_stops_in_mid_answer_is_a_failure_within_its_deadline():
    server = ScriptedServer(ServerSpeed(base_s=1.0), lambda body: 1200)
    with pytest.raises(ServersFailed, match="hung: 1 requests, and for 60 s no answer and no token"):
        generate([server], groups_of(1, 1), capacity=64, at=[(600.0, server.hang)])
    assert server.tokens < 1200


def test_the_samples_of_a_server_that_dies_are_generated_by_the_others():
    servers = [ScriptedServer(ServerSpeed(slots=8, base_s=0.1), lambda body: 60) for _ in range(3)]
    made = generate(servers, groups_of(24, 4), capacity=8, max_failures=100, at=[(10.0, servers[1].die)])
    assert [(s.uid, s.sample) for s in made.samples] == [(uid, i) for uid in range(24) for i in range(4)]
    assert made.metrics["perf/requests_repeated"] == 8


def test_a_server_that_restarts_in_mid_generation_receives_the_weights_and_samples():
    servers = [ScriptedServer(ServerSpeed(slots=8, base_s=0.1), lambda body: 60) for _ in range(2)]
    events = [(10.0, servers[1].die), (20.0, servers[1].restart)]
    generate(servers, groups_of(60, 4), capacity=8, max_failures=100, at=events)
    assert servers[1].tokens > 60 * 80
