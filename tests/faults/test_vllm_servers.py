"""Two real vLLM servers behind proxies: killed, stopped, disconnected, or with invalid answers during generation."""

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf import events
from rlhf.config import RolloutConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.engine import siblings
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.servers import server_engine as engine_module
from rlhf.rollout.servers.client import RequestSettings, ServerClient
from rlhf.rollout.servers.keeper import processes_of
from rlhf.rollout.servers.secret import VARIABLE, Secret, run_secret
from rlhf.rollout.servers.server_engine import ServerEngine, build_server_engine
from rlhf.rollout.servers.server_process import ServerProcess
from rlhf.storage.scratch import SHARED_MEMORY
from tests.support.kept_servers import kept
from tests.support.launching import question
from tests.support.numeric_ranks import run_ranks
from tests.support.sampled import asking
from tests.support.tcp_proxy import Proxy
from tests.support.tiny_models import TINY_POLICY

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
]
CPU = torch.device("cpu")
# The machine may be slow and busy. Deliberate hangs use a shorter time.
START_S, ANSWER_S, HANG_S = 240.0, 120.0, 10.0
LONGEST = 512
SEEDED = SamplingParams(max_tokens=24, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


class Behind(ServerProcess):
    """A server behind a proxy, whose address stays the same through restarts."""

    made: ClassVar[list["Behind"]] = []

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.proxy = Proxy()
        self.url = self.proxy.url
        self.made.append(self)

    def start(self) -> None:
        super().start()
        self.proxy.upstream, self.url = self.url, self.proxy.url

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        os.killpg(kept(self).process.pid, number)

    def stop_engine(self) -> None:
        """Send SIGSTOP to all processes of the server except the HTTP process."""
        server = kept(self).process.pid
        for pid in processes_of(server):
            if pid != server:
                os.kill(pid, signal.SIGSTOP)


def start(config: RolloutConfig, logs: Path, coordinator: Coordinator) -> ServerEngine:
    policy = PolicyFiles(files(), logs.parent / "model", [1], LONGEST)
    return build_server_engine(config, policy, coordinator, CPU, logs=logs, run_id="run")


def configuration() -> RolloutConfig:
    config = RolloutConfig(name="vllm_server", max_num_seqs=12)
    config.engine_kwargs.vllm = {"kv_cache_memory_bytes": 64 << 20}
    servers = config.servers
    servers.count, servers.start_timeout_s, servers.answer_timeout_s = 2, START_S, ANSWER_S
    servers.backoff_s = 0.1
    return config


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in TINY_POLICY.iterdir() if path.suffix != ".safetensors"}


@cache
def weights() -> list[tuple[str, torch.Tensor]]:
    return list(AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32).named_parameters())


def requests(count: int) -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    return [Request(1000 + i, tokenizer.encode(question(11 + i, 20 + 2 * i))) for i in range(count)]


@dataclass
class World:
    config: RolloutConfig
    secret: Secret
    engine: ServerEngine
    servers: list[Behind]
    requests: list[Request]
    event_names: list[str] = field(default_factory=list)

    def everyone_serves(self) -> None:
        """Wait until both servers have new weights and have answered since their last failure. Reset the metrics."""
        end = time.monotonic() + START_S
        while True:
            self.engine.update_weights(weights, 1)
            if self.engine.metrics()["perf/servers_serving"] == len(self.servers):
                # One request goes to each server.
                self.engine.generate(self.requests[: len(self.servers)], seed=1, step=1)
                metrics = self.engine.metrics()
                if metrics["perf/servers_serving"] == len(self.servers) and not metrics["perf/server_failures"]:
                    return
            assert time.monotonic() < end
            time.sleep(2)

    @contextmanager
    def short_deadline(self) -> Iterator[None]:
        """Shorten the time after which a server without progress counts as hung."""
        self.config.servers.answer_timeout_s = HANG_S
        try:
            yield
        finally:
            self.config.servers.answer_timeout_s = ANSWER_S

    def generate(self) -> tuple[list[Sample], dict[str, float]]:
        return self.engine.generate(self.requests, seed=3, step=5), self.engine.metrics()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    logs, config = tmp_path_factory.mktemp("runs") / "rollout_servers", configuration()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "ServerProcess", Behind)
        engine = start(config, logs, Coordinator(GlooTransport()))
    try:
        every = requests(14)
        scratches = {kept(server).scratch.folder for server in Behind.made}
        world = World(
            config,
            run_secret(logs / "secret"),
            engine,
            Behind.made,
            asking(every, SEEDED, 3) + asking(every[:4], GREEDY, 2),
        )
        assert sorted(path.name for path in logs.iterdir()) == ["secret", "server_0.log", "server_1.log"]
        events.subscribe(world.event_names.append)
        for folder in scratches:  # otherwise the checks for leftovers at the end would prove nothing
            assert [path for path in folder.iterdir() if path.is_socket()]
            assert list(SHARED_MEMORY.glob(f"{folder.name}.*"))
        world.everyone_serves()
        world.generate()  # the first generation has one-time costs
        yield world
    finally:
        engine.close()
    scratches |= {kept(server).scratch.folder for server in Behind.made}
    assert len(scratches) > len(world.servers)  # also the folders of restarted servers
    assert not [folder for folder in scratches if folder.exists() or list(SHARED_MEMORY.glob(f"*{folder.name}*"))]
    for server in world.servers:
        assert world.secret.value not in Path(server._log).read_text()
        assert not processes_of(kept(server).process.pid)


def plain(samples: list[Sample]) -> list[tuple]:
    return [(s.uid, s.sample, s.token_ids.tolist(), s.finish_reason) for s in samples]


@pytest.fixture(scope="module")
def undisturbed(world: World) -> list[Sample]:
    world.everyone_serves()
    samples, metrics = world.generate()
    assert metrics == {
        "perf/servers_serving": 2,
        "perf/server_failures": 0,
        "perf/server_restarts": 0,
        "perf/requests_repeated": 0,
        "perf/requests_moved": 0,
        "perf/stale_answers": 0,
        "perf/sync_bytes": 0,
    }
    return samples


def test_undisturbed(world, undisturbed):
    assert [(s.uid, s.sample) for s in undisturbed] == [(r.uid, r.sample) for r in world.requests]
    assert {s.version for s in undisturbed} == {1}
    for places in siblings(world.requests):
        answers = {tuple(undisturbed[place].token_ids.tolist()) for place in places}
        assert (len(answers) > 1) == (world.requests[places[0]].params == SEEDED)
    seeded = undisturbed[: 14 * 3]
    assert all(len(s) == len(s) == SEEDED.max_tokens for s in seeded)
    assert all(server.proxy.requests for server in world.servers)
    assert [e for e in world.event_names if e == "rollout.begin"]
    assert world.event_names[0] == "rollout.push"


@pytest.mark.parametrize("does", ["drop", "babble"])
def test_connections_that_break_and_garbage(world, undisturbed, does):
    world.everyone_serves()
    proxy = world.servers[0].proxy
    proxy.arm(3, getattr(proxy, does))
    samples, metrics = world.generate()
    assert plain(samples) == plain(undisturbed)
    assert (metrics["perf/server_failures"], metrics["perf/server_restarts"]) == (1, 0)
    assert metrics["perf/requests_repeated"] >= 1
    assert metrics["perf/stale_answers"] == 0


def test_weights_that_were_exchanged_behind_our_back(world, undisturbed):
    world.everyone_serves()
    proxy = world.servers[1].proxy

    def exchange() -> None:
        body = json.dumps({"new_version": "somebody else's"}).encode()
        url, headers = f"{proxy.upstream}/update_weight_version", {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, body, headers | world.secret.headers), timeout=ANSWER_S)

    proxy.arm(1, exchange)  # during a generation: on an idle server a probe might notice the change first
    samples, metrics = world.generate()
    assert plain(samples) == plain(undisturbed)
    assert metrics["perf/stale_answers"] == 1
    samples, metrics = world.generate()  # the server has received the weights again
    assert plain(samples) == plain(undisturbed)
    assert (metrics["perf/stale_answers"], metrics["perf/servers_serving"]) == (0, 2)


def weights_of_rank() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as a training engine does: with one collective call for each weight."""
    for name, tensor in weights():
        torch.distributed.barrier()
        yield name, tensor


def one_of_two_ranks(urls: list[str], secret: str, folder: Path) -> list[list[tuple]]:
    """Return the samples for this rank's requests."""
    os.environ[VARIABLE] = secret
    config, coordinator = configuration(), Coordinator(GlooTransport())
    config.servers.urls = urls
    engine = start(config, folder, coordinator)
    try:
        engine.update_weights(weights_of_rank, 4)
        mine = requests(5)[:2] if coordinator.rank == 0 else requests(5)[2:]
        samples = engine.generate(asking(mine, SEEDED, 3), seed=3, step=5)
        assert bool(engine.metrics()) is coordinator.is_leader
        assert {s.version for s in samples} == {4}
        return plain(samples)
    finally:
        engine.close()


def test_ranks_share_servers_given_by_url(world, undisturbed, tmp_path):
    world.everyone_serves()
    # These are the servers' own addresses, without the proxies that the engine of `world` uses.
    urls = [server.proxy.upstream + "/" for server in world.servers]
    first, second = run_ranks(2, partial(one_of_two_ranks, urls, world.secret.value, tmp_path))
    wanted = plain(undisturbed)
    assert (first, second) == (wanted[: 2 * 3], wanted[2 * 3 : 5 * 3])
    assert not list(tmp_path.iterdir())


def test_a_busy_server_counts_its_tokens_before_it_answers(world):
    """The token count distinguishes a slow server from a hung one."""
    world.everyone_serves()
    long = SamplingParams(max_tokens=LONGEST - 64, ignore_eos=True)
    request = Request(1, world.requests[0].token_ids, long)

    async def count() -> list[float]:
        async with aiohttp.ClientSession() as session:
            client = ServerClient(session, world.servers[0].url, RequestSettings([1], {}, 512), ANSWER_S, world.secret)
            label, before = await client.weight_label(), (await client.load()).tokens
            answer = asyncio.create_task(client.generate(request, 1, label, 1))
            counts = [before]
            while not answer.done():
                counts.append((await client.load()).tokens)
            assert len(await answer) == long.max_tokens
            return counts

    # On a busy machine, the loop may read the count only at the beginning and the end of a response.
    for _ in range(30):
        counts = asyncio.run(count())
        assert counts == sorted(counts)
        prompt = counts[0] + len(request.token_ids)
        if any(prompt < seen < prompt + long.max_tokens for seen in counts):
            return
    pytest.fail("in 30 responses, no count lay between the first and the last token")


def test_a_server_that_is_killed(world, undisturbed):
    world.everyone_serves()
    killed = world.servers[0]
    killed.proxy.arm(3, lambda: killed.signal(signal.SIGKILL))
    samples, metrics = world.generate()
    assert plain(samples) == plain(undisturbed)
    assert killed.proxy.requests >= 3
    assert (metrics["perf/server_failures"], metrics["perf/servers_serving"]) == (1, 1)
    assert metrics["perf/requests_repeated"] >= 1


def stopped_midway(world: World, requests: list[Request]) -> list[Sample]:
    """Stop a generation when each response has some of its tokens. How long this takes depends on the machine."""
    for tried in range(18):
        world.engine.begin(requests, seed=3, step=5)
        time.sleep(0.05 * 1.25**tried)
        stopped = world.engine.stop()
        if all(sample.finish_reason == "partial" and len(sample) for sample in stopped):
            return list(stopped)
    raise AssertionError("after no wait did all responses have some of their tokens")


def test_a_stopped_generation_goes_on_under_newer_weights(world):
    """The first tokens keep version 1 and their log-probs. The tokens after the second weight push have version 2."""
    world.everyone_serves()
    long = SamplingParams(max_tokens=LONGEST - 64, ignore_eos=True)
    requests = [Request(2000 + i, world.requests[0].token_ids, long) for i in range(4)]
    stopped = stopped_midway(world, requests)
    assert all(0 < len(sample) < long.max_tokens for sample in stopped)
    assert {sample.versions for sample in stopped} == {((1, len(sample)),) for sample in stopped}
    world.engine.update_weights(weights, 2)
    continued = [replace(r, response=sample) for r, sample in zip(requests, stopped, strict=True)]
    ended = world.engine.generate(continued, seed=3, step=6)
    for before, after in zip(stopped, ended, strict=True):
        assert after.versions == ((1, len(before)), (2, long.max_tokens))
        assert after.token_ids[: len(before)].tolist() == before.token_ids.tolist()
        assert after.log_probs[: len(before)].tobytes() == before.log_probs.tobytes()
    assert world.engine.metrics()["perf/server_failures"] == 0


def test_greedy_responses_are_the_same_with_a_stop_in_between(world):
    world.everyone_serves()
    long = SamplingParams(temperature=0.0, max_tokens=LONGEST - 64, ignore_eos=True)
    request = Request(3000, world.requests[0].token_ids, long)
    (whole,) = world.engine.generate([request], seed=3, step=5)
    (stopped,) = stopped_midway(world, [request])
    assert 0 < len(stopped) < long.max_tokens
    assert stopped.token_ids.tolist() == whole.token_ids[: len(stopped)].tolist()
    (ended,) = world.engine.generate([replace(request, response=stopped)], seed=3, step=5)
    assert plain([ended]) == plain([whole])


def test_one_is_killed_and_the_engine_of_one_stops_while_the_ranks_train(world, undisturbed):
    world.everyone_serves()
    killed, stopped = world.servers
    killed.proxy.arm(2, lambda: killed.signal(signal.SIGKILL))
    stopped.proxy.arm(4, stopped.stop_engine)
    with world.short_deadline():
        world.engine.begin(world.requests, seed=3, step=5)
        found = world.engine.stop()
        world.engine.update_weights(weights, 8)
        left = [(i, r) for i, r in enumerate(world.requests) if found[i].finish_reason == "partial"]
        continued = [replace(r, response=found[i] if len(found[i]) else None) for i, r in left]
        for (i, _), sample in zip(left, world.engine.generate(continued, seed=3, step=5), strict=True):
            found[i] = sample
    metrics = world.engine.metrics()
    assert [(s.uid, s.sample) for s in found] == [(s.uid, s.sample) for s in undisturbed]
    assert {version for sample in found for version, _ in sample.versions} <= {1, 8}
    assert metrics["perf/server_failures"] >= 1
    assert metrics["perf/servers_serving"] >= 1


def test_a_server_that_hangs(world, undisturbed):
    world.everyone_serves()
    hung = world.servers[1]
    hung.proxy.arm(2, lambda: hung.signal(signal.SIGSTOP))
    with world.short_deadline():
        samples, metrics = world.generate()
    assert plain(samples) == plain(undisturbed)
    assert (metrics["perf/server_failures"], metrics["perf/servers_serving"]) == (1, 1)
    assert metrics["perf/requests_repeated"] >= 1
