"""Adapters for scripted servers: the base once, adapters alone from then on, and requests that name the adapters."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf.config import LoraConfig, RolloutConfig, ServersConfig
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.servers.adapter_engine import AdapterServerEngine, build_adapter_server_engine
from rlhf.rollout.servers.weights.push import UNFINISHED
from rlhf.rollout.weight_digest import digest, read_digests
from tests.support.launching import TINY_POLICY
from tests.support.numeric_ranks import run_ranks
from tests.support.scripted_vllm import DEADLINE_S, EOS, ScriptedVllm, log_prob_of

BASE = [
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
FIRST = [
    "/pause?mode=abort",
    "/update_weight_version",
    "/v1/unload_lora_adapter",
    "/v1/load_lora_adapter",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/resume",
]
"""Calls of a push of adapters to a server without earlier adapters."""
LATER = [*FIRST[:2], "/v1/unload_lora_adapter", *FIRST[2:]]
STEP = 3
LORA = LoraConfig(enabled=True, rank=2, alpha=4.0)
REQUESTS = [Request(100 + i, [20, 21], SamplingParams(max_tokens=32)) for i in range(24)]


def base(value: float = 1.0) -> Iterator[tuple[str, Tensor]]:
    yield "q.weight", torch.full((64, 64), value)
    yield "norm.weight", torch.arange(7.0)


def adapters(value: float = 1.0) -> Iterator[tuple[str, Tensor]]:
    yield "q.lora_A.weight", torch.full((2, 64), value)
    yield "q.lora_B.weight", torch.full((64, 2), value)


@pytest.fixture
def servers() -> Iterator[list[ScriptedVllm]]:
    made = [ScriptedVllm(0.004, 16) for _ in range(2)]
    yield made
    for server in made:
        server.close()


@contextmanager
def trainer(urls: Sequence[str], folder: Path) -> Iterator[AdapterServerEngine]:
    """Start a trainer's engine, and end it as a crash does."""
    limits = ServersConfig(urls=list(urls), answer_timeout_s=5.0, backoff_s=0.1, start_timeout_s=30.0)
    config = RolloutConfig(name="vllm_server", max_num_seqs=64, servers=limits)
    files = PolicyFiles({"config.json": (TINY_POLICY / "config.json").read_bytes()}, folder / "model", [EOS], 256)
    coordinator, device = Coordinator(GlooTransport()), torch.device("cpu")
    engine = build_adapter_server_engine(LORA, config, files, coordinator, device, logs=folder, run_id="run")
    try:
        yield engine
    finally:
        engine.close()


def up(engine: AdapterServerEngine, count: int) -> None:
    """Wait until the trainer has the labels of `count` servers."""
    end = time.monotonic() + DEADLINE_S
    while engine._fleet is not None:
        states = engine._fleet.do(lambda loop: [member.health.state for member in loop._members])
        if sum(state in ("stale", "serving") for state in states) == count:
            return
        assert time.monotonic() < end, states
        time.sleep(0.01)


def calls(servers: Sequence[ScriptedVllm]) -> list[list[str]]:
    """Return the calls that changed each server's state since the last call of this function."""
    found = [[path for path in server.calls if path != "/abort_requests"] for server in servers]
    for server in servers:
        server.calls.clear()
    return found


def bytes_of(tensors: Iterator[tuple[str, Tensor]]) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


def test_the_base_is_sent_once_and_each_request_names_the_step_s_adapters(servers, tmp_path):
    with trainer([server.url for server in servers], tmp_path) as engine:
        up(engine, 2)
        engine.update_adapters(base, adapters, STEP)
        assert calls(servers) == [BASE + FIRST] * 2
        assert engine.metrics()["perf/sync_bytes"] > 2 * (bytes_of(base()) + bytes_of(adapters()))
        engine.update_adapters(base, partial(adapters, 2.0), STEP + 1)
        assert calls(servers) == [LATER] * 2
        sent = engine.metrics()["perf/sync_bytes"]
        assert 2 * bytes_of(adapters()) < sent < bytes_of(base())
        for server in servers:
            assert list(server.adapters) == [server.label]
            (message,) = server.adapters.values()
            assert message.settings == {"r": 2, "lora_alpha": 4.0, "use_rslora": False, "target_modules": []}
            assert all(torch.equal(message.tensors[name], tensor) for name, tensor in adapters(2.0))
            # The server checks everything that it now has: the base, and the adapters with their scale.
            factors = {"q.lora_a": torch.full((2, 64), 2.0), "q.lora_b": torch.full((64, 2), 4.0)}
            expected = {name: digest(tensor, torch.float32) for name, tensor in [*base(), *factors.items()]}
            assert message.digests == read_digests(expected)
        samples = engine.generate(REQUESTS, seed=1, step=STEP + 2)
        assert engine.metrics()["perf/server_failures"] == 0
    assert {value for sample in samples for value in sample.log_probs.tolist()} == {log_prob_of(STEP + 1)}


def test_the_next_trainer_uses_servers_with_the_same_adapters_and_sends_others_without_the_base(servers, tmp_path):
    urls = [server.url for server in servers]
    with trainer(urls, tmp_path) as engine:
        up(engine, 2)
        engine.update_adapters(base, adapters, STEP)
    calls(servers)
    with trainer(urls, tmp_path) as engine:
        up(engine, 2)
        engine.update_adapters(base, adapters, STEP)
        assert calls(servers) == [ADOPTED] * 2
        assert len(engine.generate(REQUESTS, seed=1, step=STEP + 1)) == len(REQUESTS)
        assert engine.metrics()["perf/server_failures"] == 0
    with trainer(urls, tmp_path) as engine:  # a resume from an earlier step
        up(engine, 2)
        engine.update_adapters(base, partial(adapters, 0.5), STEP - 1)
        assert calls(servers) == [LATER] * 2
    with trainer(urls, tmp_path) as engine:
        up(engine, 2)
        engine.update_adapters(partial(base, 2.0), adapters, STEP)
        assert calls(servers) == [BASE + FIRST] * 2


def test_a_restarted_server_gets_base_and_adapters_while_the_others_generate(servers, tmp_path):
    first, second = servers
    with trainer([server.url for server in servers], tmp_path) as engine:
        up(engine, 2)
        engine.update_adapters(base, adapters, STEP)
        calls(servers)
        second.label = "default"
        second.adapters.clear()
        samples = engine.generate(REQUESTS, seed=1, step=STEP + 1)
        assert calls(servers)[0] == []
        up(engine, 2)
        samples += engine.generate(REQUESTS, seed=2, step=STEP + 1)
        assert first.label == second.label
        assert list(first.adapters) == list(second.adapters)
    assert {value for sample in samples for value in sample.log_probs.tolist()} == {log_prob_of(STEP)}


class Damaged(ScriptedVllm):
    """A server that reports once that its weights differ from the digests."""

    def __init__(self) -> None:
        super().__init__(0.004, 16)
        self.damaged = False

    def load_adapter(self, body, secret):
        if self.damaged:
            self.damaged = False
            raise RuntimeError("the base differs")
        super().load_adapter(body, secret)


def test_a_server_that_rejects_adapters_gets_the_base_again(tmp_path):
    server = Damaged()
    with trainer([server.url], tmp_path) as engine:
        up(engine, 1)
        engine.update_adapters(base, adapters, STEP)
        calls([server])
        server.damaged = True
        engine.update_adapters(base, partial(adapters, 2.0), STEP + 1)
        assert server.label == UNFINISHED
        assert calls([server]) == [[*LATER[:5], "/update_weight_version"]]
        assert len(engine.generate(REQUESTS, seed=1, step=STEP + 2)) == len(REQUESTS)
        assert calls([server]) == [BASE + FIRST]
    server.close()


def test_a_server_started_without_adapters_is_rejected(tmp_path):
    server = ScriptedVllm()
    server.serves_adapters = False
    with (
        pytest.raises(
            UserError, match=rf"{server.url} serves no adapters. Start it with --enable-lora --max-lora-rank 8"
        ),
        trainer([server.url], tmp_path),
    ):
        raise AssertionError("the trainer started")
    server.close()


def on_ranks(urls: Sequence[str], folder: Path) -> int:
    with trainer(urls, folder) as engine:
        up(engine, 2)
        engine.update_adapters(base, adapters, STEP)
        engine.update_adapters(base, partial(adapters, 2.0), STEP + 1)
        return len(engine.generate(REQUESTS, seed=1, step=STEP + 2))


@pytest.mark.slow
def test_two_ranks_gather_base_and_adapters(servers, tmp_path):
    assert run_ranks(2, partial(on_ranks, [server.url for server in servers], tmp_path)) == [len(REQUESTS)] * 2
    assert calls(servers) == [BASE + FIRST + LATER] * 2
