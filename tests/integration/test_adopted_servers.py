"""Scripted servers that outlive a trainer: the next trainer with the same weights uses them without a push."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from rlhf.config import RolloutConfig, ServersConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.server_engine import ServerEngine, build_server_engine
from rlhf.rollout.servers.weights.push import UNFINISHED, WeightPush
from tests.support.launching import TINY_POLICY
from tests.support.numeric_ranks import run_ranks
from tests.support.scripted_vllm import DEADLINE_S, EOS, ScriptedVllm, log_prob_of

PUSHED = [
    "/pause?mode=abort",
    "/update_weight_version",
    "/start_weight_update",
    "/update_weights",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]
ADOPTED = ["/pause?mode=abort&clear_cache=false", "/resume"]
STEP = 3
REQUESTS = [Request(100 + i, [20, 21], SamplingParams(max_tokens=32)) for i in range(24)]


def weights(value: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.arange(7.0)
    yield "b", torch.full((3, 2), value)


@pytest.fixture
def servers() -> Iterator[list[ScriptedVllm]]:
    made = [ScriptedVllm(0.004, 16) for _ in range(2)]
    yield made
    for server in made:
        server.close()


@contextmanager
def trainer(urls: Sequence[str], folder: Path, run_id: str = "run") -> Iterator[ServerEngine]:
    """Start a trainer's engine, and end it as a crash does: its requests stay on the servers."""
    limits = ServersConfig(urls=list(urls), answer_timeout_s=5.0, backoff_s=0.1, start_timeout_s=30.0)
    config = RolloutConfig(name="vllm_server", max_num_seqs=64, servers=limits)
    files = PolicyFiles({"config.json": (TINY_POLICY / "config.json").read_bytes()}, folder / "model", [EOS], 256)
    coordinator = Coordinator(GlooTransport())
    engine = build_server_engine(config, files, coordinator, torch.device("cpu"), logs=folder, run_id=run_id)
    try:
        yield engine
    finally:
        engine.close()


def all_up(engine: ServerEngine, count: int) -> None:
    """Wait until the trainer has the labels of `count` servers."""
    end = time.monotonic() + DEADLINE_S
    while engine._fleet is not None:
        states = engine._fleet.do(lambda loop: [member.health.state for member in loop._members])
        if states == ["stale"] * count:
            return
        assert time.monotonic() < end, states
        time.sleep(0.01)


def until(reached) -> None:
    end = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def calls(servers: Sequence[ScriptedVllm]) -> list[list[str]]:
    """Return the calls that changed each server's state since the last call of this function."""
    found = [[path for path in server.calls if path != "/abort_requests"] for server in servers]
    for server in servers:
        server.calls.clear()
    return found


def crashed_with_requests(servers: Sequence[ScriptedVllm], folder: Path) -> None:
    """Run a trainer that ends while both servers generate."""
    for server in servers:
        server.token_s = 10.0
    with trainer([server.url for server in servers], folder) as engine:
        all_up(engine, len(servers))
        engine.update_weights(weights, STEP)
        engine.begin(REQUESTS, seed=1, step=STEP + 1)
        until(lambda: all(server.aborted for server in servers))
    assert calls(servers) == [PUSHED] * len(servers)
    for server in servers:
        server.token_s = 0.004


def test_the_next_trainer_aborts_the_requests_of_a_dead_one_and_pushes_nothing(servers, tmp_path):
    crashed_with_requests(servers, tmp_path)
    labels = {server.label for server in servers}
    assert len(labels) == 1
    assert labels.pop().startswith(f"run.step_{STEP}.")
    with trainer([server.url for server in servers], tmp_path) as engine:
        all_up(engine, 2)
        assert all(server.aborted for server in servers), "the dead trainer's requests have ended by themselves"
        engine.update_weights(weights, STEP)
        until(lambda: not any(server.aborted for server in servers))
        assert all(set(server.answers) == {"abort"} for server in servers)
        assert calls(servers) == [ADOPTED, ADOPTED]
        samples = engine.generate(REQUESTS, seed=1, step=STEP + 1)
        assert engine.metrics()["perf/server_failures"] == engine.metrics()["perf/stale_answers"] == 0
        # The next step's weights are pushed as always.
        engine.update_weights(partial(weights, 2.0), STEP + 1)
        assert calls(servers) == [PUSHED, PUSHED]
    assert [sample.uid for sample in samples] == [request.uid for request in REQUESTS]
    assert {value for sample in samples for value in sample.log_probs.tolist()} == {log_prob_of(STEP)}


@pytest.mark.parametrize(
    ("run_id", "value", "step"), [("another", 1.0, STEP), ("run", 1.5, STEP), ("run", 1.0, STEP + 1)]
)
def test_other_weights_another_step_or_another_run_is_pushed(servers, tmp_path, run_id, value, step):
    crashed_with_requests(servers, tmp_path)
    before = {server.label for server in servers}
    with trainer([server.url for server in servers], tmp_path, run_id) as engine:
        all_up(engine, 2)
        engine.update_weights(partial(weights, value), step)
        assert calls(servers) == [PUSHED, PUSHED]
    assert not before & {server.label for server in servers}


def test_weights_that_a_server_had_before_the_last_push_are_pushed_again(servers, tmp_path):
    """After a resume from an earlier step, the run comes to the same weights again."""
    crashed_with_requests(servers, tmp_path)
    with trainer([server.url for server in servers], tmp_path) as engine:
        all_up(engine, 2)
        engine.update_weights(partial(weights, 0.5), STEP - 1)
        engine.update_weights(weights, STEP)
        assert calls(servers) == [PUSHED + PUSHED] * 2
        engine.generate(REQUESTS, seed=1, step=STEP + 1)
        assert engine.metrics()["perf/stale_answers"] == 0


def test_a_server_whose_label_is_not_known_is_pushed(servers, tmp_path):
    """One of the answers came from other weights, so the next step's push must not take the server for an equal one."""
    with trainer([server.url for server in servers], tmp_path) as engine:
        all_up(engine, 2)
        engine.update_weights(weights, STEP)
        calls(servers)
        assert engine._fleet is not None
        engine._fleet.do(lambda loop: [member.health.outdated("an answer by others") for member in loop._members])
        engine.update_weights(partial(weights, 2.0), STEP + 1)
        assert calls(servers) == [PUSHED, PUSHED]


def test_one_server_is_adopted_and_a_restarted_one_gets_the_weights(servers, tmp_path):
    crashed_with_requests(servers, tmp_path)
    first, second = servers
    second.label = "default"
    with trainer([server.url for server in servers], tmp_path) as engine:
        all_up(engine, 2)
        engine.update_weights(weights, STEP)
        assert calls(servers) == [ADOPTED, PUSHED]
        assert first.label == second.label
        assert len(engine.generate(REQUESTS, seed=1, step=STEP + 1)) == len(REQUESTS)


def test_a_server_that_answers_after_the_sync_is_adopted_before_it_serves(servers, tmp_path):
    """It may be paused, and may still have requests of the dead trainer."""
    crashed_with_requests(servers, tmp_path)
    late = servers[1]
    late.resumed.clear()
    late.silent.set()
    with trainer([server.url for server in servers], tmp_path) as engine:
        engine.update_weights(weights, STEP)
        assert calls(servers) == [ADOPTED, []]
        late.silent.clear()
        all_up_late = lambda loop: loop._members[1].health.state  # noqa: E731
        until(lambda: engine._fleet is not None and engine._fleet.do(all_up_late) == "stale")
        engine.generate(REQUESTS, seed=1, step=STEP + 1)
        assert calls(servers) == [[], ADOPTED]
        assert "stop" in late.answers
        assert engine.metrics()["perf/server_failures"] == 0, "a paused server got requests, which it rejects"


def test_an_update_that_was_cut_off_is_never_taken_for_the_old_weights(servers, tmp_path):
    crashed_with_requests(servers, tmp_path)

    def cut_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(2.0)
        raise RuntimeError("the trainer is lost")

    push = WeightPush(RolloutConfig(), torch.device("cpu"), Secret("of-this-run-alone", "here"))
    with pytest.raises(RuntimeError, match="is lost"):
        push.send([server.url for server in servers], cut_off(), f"run.step_{STEP + 1}")
    assert {server.label for server in servers} == {UNFINISHED}
    calls(servers)
    with trainer([server.url for server in servers], tmp_path) as engine:
        all_up(engine, 2)
        engine.update_weights(weights, STEP)
        assert calls(servers) == [PUSHED, PUSHED]
        assert len(engine.generate(REQUESTS, seed=1, step=STEP + 1)) == len(REQUESTS)


def on_ranks(urls: Sequence[str], folder: Path) -> int:
    with trainer(urls, folder) as engine:
        all_up(engine, 2)
        engine.update_weights(weights, STEP)
        return len(engine.generate(REQUESTS, seed=1, step=STEP + 1))


@pytest.mark.slow
def test_two_ranks_gather_the_weights_to_compare_them(servers, tmp_path):
    crashed_with_requests(servers, tmp_path)
    assert run_ranks(2, partial(on_ranks, [server.url for server in servers], tmp_path)) == [len(REQUESTS)] * 2
    assert calls(servers) == [ADOPTED, ADOPTED]
