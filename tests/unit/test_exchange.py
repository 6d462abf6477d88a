"""Requests and samples travel between ranks as tensors, each only to the rank that needs it, and lose nothing."""

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from torch import Tensor

from rlhf.config.schema.rollout import ServersConfig
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.exchange import gather_requests, requests_from_tensors, requests_to_tensors, scatter_samples
from rlhf.rollout.servers.client import RequestSettings
from rlhf.rollout.servers.fleet import Fleet
from rlhf.rollout.servers.fleet_loop import FleetLoop
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.server_engine import ServerEngine
from rlhf.rollout.servers.weights.push import Pushed
from rlhf.rollout.vllm.requests import request_seed
from rlhf.storage.file_parts import FilePart
from tests.support.thread_ranks import make_coordinator, run_thread_ranks

VOCAB, HERE = (1 << 31) - 1, "127.0.0.1"
PARAMS = [
    (2, SamplingParams(top_p=1 / 3, stop=("\n", "ä"))),
    (1, SamplingParams(temperature=0, max_tokens=9)),
    (3, SamplingParams(top_k=4, ignore_eos=True)),
]


def requests_of(rank: int) -> list[Request]:
    """Return requests for `rank` + 1 prompts (none on rank 2), with unusual values. Samples of every second
    prompt are numbered from 1."""
    requests = []
    for i in range(0 if rank == 2 else rank + 1):
        n, params = PARAMS[(rank + i) % 3]
        prompt = [rank, VOCAB - 1 - i, *range(i)]
        requests += [Request(10 * rank + i, prompt, params, number) for number in range(i % 2, i % 2 + n)]
    return requests


def answer_of(prompt: Sequence[int], number: int) -> tuple[list[int], list[float], str]:
    """Return the policy's answer to a prompt: token ids, log-probs and the finish reason."""
    tokens = [sum(prompt) % VOCAB, *range(number)]
    return tokens, [-(token % 7 + 1) / 3 for token in tokens], ["stop", "length"][number % 2]


def sample_of(request: Request) -> Sample:
    return Sample.of(request.uid, request.sample, *answer_of(request.token_ids, request.sample), 5)


def observed(number: int) -> Sample:
    """A sample of `number` % 4 tokens, of which the policy wrote the second only."""
    length = number % 4
    spans = ((0, 1), (2, 3))[: length // 2 + length % 2]
    whole = Sample.of(number, number, [7] * length, [-0.0] * length, "length", 0, spans)
    return replace(whole, versions=((3, length // 2), (4, length)))


class Server(ThreadingHTTPServer):
    """A rollout server whose weights are called `label`."""

    daemon_threads = True

    def __init__(self) -> None:
        self.label = ""
        super().__init__((HERE, 0), Handler)
        Thread(target=self.serve_forever, daemon=True).start()

    def send(self, urls: Sequence[str], weights: Iterable[tuple[str, Tensor]], name: str) -> Pushed:
        self.label = name
        self.sent = [(key, tensor.tolist()) for key, tensor in weights]
        return Pushed(name, dict.fromkeys(urls))


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer("vllm:generation_tokens_total{} 7\n")
        else:
            versions = {"/version": {"version": "0.32.0"}, "/weight_info": {"weight_version": self.server.label}}
            self.answer(json.dumps(versions.get(self.path, {})))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rank, last = asked["token_ids"][:2]
        number = asked["sampling_params"]["seed"] - request_seed(1, 6, Request(10 * rank + VOCAB - 1 - last, []))
        tokens, log_probs, reason = answer_of(asked["token_ids"], number)
        content = [{"token_id": t, "logprob": value} for t, value in zip(tokens, log_probs, strict=True)]
        span = {"version": self.server.label, "start": 0, "end": len(tokens)}
        choice = {"index": 0, "token_ids": tokens, "finish_reason": reason, "weight_versions": [span]}
        self.answer(json.dumps({"choices": [choice | {"logprobs": {"content": content}}]}))

    def answer(self, text: str) -> None:
        with suppress(OSError):  # the client may have disconnected
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def unpicklable(travels: Request | Sample) -> None:
    raise AssertionError(f"{travels} was pickled")


@pytest.fixture(autouse=True)
def nothing_is_pickled(monkeypatch):
    for kind in (Request, Sample):
        monkeypatch.setattr(kind, "__reduce__", unpicklable)


def generate(rank: int) -> tuple[bool, list[int]]:
    """Return whether this rank twice gets the samples of its requests, and the engine's number of requests per rank."""
    coordinator, resources = make_coordinator(), ExitStack()
    fleet = server = None
    if rank == 0:
        server = Server()
        settings = ServersConfig(urls=[f"http://{HERE}:{server.server_port}"], max_failures=0)
        fleet = Fleet(FleetLoop(settings, {}, RequestSettings([1], {}, VOCAB), Secret("own", "RUN/secret"), capacity=4))
        for close in (server.server_close, server.shutdown, fleet.close):
            resources.callback(close)
    parts = {"fused": [FilePart("first", 0, (1, 2)), FilePart("second", 2, (2, 2))]}
    engine = ServerEngine(coordinator, fleet, server, resources, torch.float32, parts, "run")  # type: ignore[arg-type]
    try:
        engine.wait_until_ready()
        weights = [("fused", torch.arange(6.0).view(1, 3, 2)), ("other", torch.ones(1))]
        engine.update_weights(lambda: weights, 5)
        mine = requests_of(rank)
        same = [engine.generate(mine, seed=1, step=6) == list(map(sample_of, mine)) for _ in range(2)]
        if server is not None:
            assert server.sent == [("first", [[0, 1]]), ("second", [[2, 3], [4, 5]]), ("other", [1])]
        return all(same), engine._sizes
    finally:
        engine.close()


def test_requests_go_to_the_leader_and_samples_to_their_rank():
    """Earlier, requests were pickled, and every rank received the requests of all ranks."""
    received = run_thread_ranks(4, generate)
    sizes = [len(requests_of(rank)) for rank in range(4)]
    assert received == [(True, sizes), (True, []), (True, []), (True, [])]


def exchange_in_group(rank: int, size: int) -> list[int]:
    """Return the uids that this rank receives from its group of `size` consecutive ranks."""
    coordinator, first = make_coordinator(), rank // size * size
    group = range(first, first + size)
    gathered = gather_requests(requests_of(rank), group, group, coordinator)
    assert repr(gathered) == repr([requests_of(other) for other in group])
    return sorted({request.uid for of_rank in gathered for request in of_rank})


@pytest.mark.parametrize(
    ("size", "uids"),
    [(1, [[0], [10, 11], [], [30, 31, 32, 33]]), (2, [[0, 10, 11]] * 2 + [[30, 31, 32, 33]] * 2)],
)
def test_requests_stay_in_their_tensor_parallel_group(size, uids):
    assert run_thread_ranks(4, exchange_in_group, size) == uids


def test_requests_keep_their_responses_so_far():
    plain = requests_of(3)
    begun = [
        replace(request, response=replace(observed(i), finish_reason="partial")) for i, request in enumerate(plain)
    ]
    mixed = [*plain, *begun]
    assert requests_from_tensors(requests_to_tensors(mixed)) == mixed


def hand_out(rank: int, parts: list[list[int]]) -> bool:
    """Return whether this rank receives exactly its part of the leader's samples for all ranks."""
    held = [[observed(n) for n in part] for part in parts]
    return scatter_samples(held if rank == 0 else [], make_coordinator()) == held[rank]


def test_ranks_without_samples_and_empty_samples():
    assert run_thread_ranks(3, hand_out, [[1], [], [3, 4, 7]]) == [True] * 3
