"""Weight pushes from a trainer to a vLLM server: in one piece, in buckets, and interrupted; and the end of a server."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from safetensors.torch import save as save_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlhf.backends import build_backend
from rlhf.backends.training import Training
from rlhf.config import BackendConfig, LoraConfig, OptimConfig, RolloutConfig
from rlhf.models.adapter_layers import add_adapters
from rlhf.models.adapter_start import fill_from_seed
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.embedded import build_embedded_engine
from rlhf.rollout.servers.keeper import Keeper, processes_of
from rlhf.rollout.servers.secret import Secret, SecretMiddleware
from rlhf.rollout.servers.server_process import ServerProcess
from rlhf.rollout.servers.weights import push as push_module
from rlhf.rollout.servers.weights.pull import WeightServer
from rlhf.rollout.servers.weights.push import UNFINISHED, WeightPush
from tests.support.kept_servers import kept
from tests.support.launching import question
from tests.support.numeric_ranks import single_rank
from tests.support.sampled import sampled
from tests.support.tiny_models import TINY_POLICY, save
from tests.support.vllm_process import LONGEST, RESPONSE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
]
CPU = torch.device("cpu")
START_S, ANSWER_S = 240.0, 60.0
SECRET = Secret("of-this-run-alone", "here")
SMALL_BUCKETS = 100_000  # bytes; the policy has about 3 MB


def settings(answer_s: float = ANSWER_S) -> RolloutConfig:
    config = RolloutConfig(max_num_seqs=16)
    config.servers.answer_timeout_s = answer_s
    config.engine_kwargs.vllm = {"kv_cache_memory_bytes": 64 << 20}
    return config


def policy(changed: bool = False) -> PreTrainedModel:
    """Return the bundled policy. `changed`: all weights are changed, as if trained a little."""
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32)
    if changed:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    return [tokenizer.encode(question(a, a + 7)) for a in range(11, 19)]


def embedded(model: PreTrainedModel) -> list[list[int]]:
    """Return the greedy responses of the embedded engine."""
    engine = build_embedded_engine(model, AutoTokenizer.from_pretrained(TINY_POLICY), RolloutConfig())
    greedy = SamplingParams(temperature=0, max_tokens=RESPONSE, ignore_eos=True)
    samples = sampled(engine, [Request(i, ids) for i, ids in enumerate(prompts())], greedy, seed=0, step=0)
    return [sample.token_ids.tolist() for sample in samples]


class Server:
    """A server that the trainer's code starts, and the requests of the tests."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.log = log
        self.process = ServerProcess(settings(), folder, LONGEST, CPU, (), SECRET, log, Keeper())

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(self.request("/health"), timeout=2)
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < end, self.log.read_text()[-3000:]
                time.sleep(0.1)

    def request(self, path: str, body: bytes | None = None) -> urllib.request.Request:
        """Return a request with the secret."""
        headers = SECRET.headers | {"Content-Type": "application/json"}
        return urllib.request.Request(self.process.url + path, body, headers)

    def greedy(self) -> tuple[list[list[int]], set[str]]:
        """Return the server's greedy responses, and the names of the weights that generated them."""
        tokens, versions = [], set()
        for ids in prompts():
            params = {"temperature": 0, "max_tokens": RESPONSE, "ignore_eos": True, "logprobs": 0}
            body = json.dumps({"token_ids": ids, "sampling_params": params}).encode()
            with urllib.request.urlopen(self.request("/inference/v1/generate", body), timeout=ANSWER_S) as response:
                choice = json.load(response)["choices"][0]
            tokens.append(choice["token_ids"])
            versions |= {span["version"].rpartition(".")[0] for span in choice["weight_versions"]}
        return tokens, versions


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    made = Server(TINY_POLICY, folder / "server.log")
    made.process.start()
    try:
        yield made
    finally:
        made.process.kill()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, server: Server) -> list[list[int]]:
    """Responses of a new engine that loads the changed policy from a folder. Made while the server starts."""
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "in.json").write_text(json.dumps(prompts()))
    save(policy(changed=True), folder / "model")
    command = [sys.executable, "-m", "tests.support.vllm_process", str(folder / "model"), str(folder / "in.json")]
    ended = subprocess.run(
        [*command, str(folder / "out.json")], timeout=START_S, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


def test_the_server_answers_as_the_weights_that_it_was_given(server: Server, fresh: list[list[int]]):
    server.wait()
    url, old, new = server.process.url, policy(), policy(changed=True)
    assert WeightPush(settings(), CPU, SECRET).send([url], old.named_parameters(), "step 0").errors == {url: None}
    first = server.greedy()
    assert first == (embedded(old), {"step 0"})

    small = WeightPush(settings(), CPU, SECRET, bucket_bytes=SMALL_BUCKETS)
    assert small.send([url], new.named_parameters(), "step 1").errors == {url: None}
    assert server.greedy() == (embedded(new), {"step 1"}) == (fresh, {"step 1"})
    assert server.greedy() != first

    assert small.send([url], old.named_parameters(), "step 2").errors == {url: None}
    assert server.greedy() == (embedded(old), {"step 2"})


def status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return response.status
    except HTTPError as error:
        return error.code


def test_every_route_asks_for_the_secret(server: Server):
    server.wait()
    with urllib.request.urlopen(server.request("/openapi.json"), timeout=ANSWER_S) as response:
        paths = json.load(response)["paths"]
    routes = {(path, method.upper()) for path, methods in paths.items() for method in methods}
    assert {("/update_weights", "POST"), ("/pause", "POST"), ("/v1/chat/completions", "POST")} <= routes
    # Also try routes that the schema does not list.
    routes |= {(path, "GET") for path in ("/metrics", "/docs", "/openapi.json", "/health", "/ping", "/none")}
    for shown in ({}, {"Authorization": "Bearer of-another-run"}):
        for path, method in sorted(routes):
            asked = urllib.request.Request(server.process.url + path, headers=shown, method=method)
            assert status(asked) == 401, (path, method)
    assert {status(server.request(path)) for path in ("/metrics", "/health", "/weight_info")} == {200}


def test_weights_of_a_trainer_with_another_secret_are_not_fetched(server: Server, monkeypatch: pytest.MonkeyPatch):
    """The server does not fetch such weights, even if the trainer may call the server."""
    server.wait()
    url, old = server.process.url, policy()

    class Foreign(WeightServer):
        def __init__(self, address: str, timeout_s: float, secret: str) -> None:
            super().__init__(address, timeout_s, "of-another-run")

    weight_push = WeightPush(settings(), CPU, SECRET)
    with monkeypatch.context() as patched:
        patched.setattr(push_module, "WeightServer", Foreign)
        outcome = weight_push.send([url], old.named_parameters(), "foreign")
    assert "/update_weights failed with HTTP 500" in (outcome.errors[url] or "")
    assert "does not have this server's secret" in server.log.read_text()
    assert weight_push.send([url], old.named_parameters(), "ours").errors == {url: None}
    assert server.greedy() == (embedded(old), {"ours"})
    other = WeightPush(settings(), CPU, Secret("of-another-run", "there"))
    assert "/pause?mode=abort failed with HTTP 401" in str(
        other.send([url], old.named_parameters(), "other").errors[url]
    )
    assert server.greedy()[1] == {"ours"}


def test_the_secret_is_on_no_command_line_and_in_no_log_and_the_port_is_this_machines(server: Server):
    server.wait()
    process = kept(server.process).process
    group = processes_of(process.pid)
    for pid in group:
        assert SECRET.value.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    log = server.log.read_text()
    assert SECRET.value not in log
    assert SecretMiddleware.__name__ in log
    port = int(server.process.url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    at = {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    assert at == {"0100007F"}


class Damaged(WeightServer):
    """Serves the third bucket with a flipped bit."""

    count = 0

    def serve(self, data: bytes) -> Any:
        self.count += 1
        return super().serve(data[:-1] + bytes([data[-1] ^ 1]) if self.count == 3 else data)


class Gone(WeightServer):
    """A trainer that dies before its third bucket is fetched."""

    count = 0

    def serve(self, data: bytes) -> Any:
        self.count += 1
        if self.count == 3:
            self.close()
        return super().serve(data)


@pytest.mark.parametrize(("trouble", "reason"), [(Damaged, "update_weights"), (Gone, "update_weights")])
def test_after_an_update_that_broke_off_the_next_one_is_whole(
    server: Server, monkeypatch: pytest.MonkeyPatch, trouble: type[WeightServer], reason: str
):
    server.wait()
    url, old, new = server.process.url, policy(), policy(changed=True)
    nobody = "http://127.0.0.1:9"
    walked = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in new.named_parameters():
            walked.append(pair[0])
            yield pair

    weight_push = WeightPush(settings(), CPU, SECRET, bucket_bytes=SMALL_BUCKETS)
    with monkeypatch.context() as patched:
        patched.setattr(push_module, "WeightServer", trouble)
        outcome = weight_push.send([url, nobody], weights(), "broken")
    assert reason in (outcome.errors[url] or "")
    assert "refused" in (outcome.errors[nobody] or "")
    assert walked == [name for name, _ in new.named_parameters()]

    assert weight_push.send([url, nobody], old.named_parameters(), "whole").errors[url] is None
    assert server.greedy() == (embedded(old), {"whole"})


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
LORA = LoraConfig(enabled=True, rank=4, alpha=12.0)


class Adapted:
    """The bundled policy with adapters, in the engine that trains them."""

    def __init__(self) -> None:
        model = policy()
        self.layers = model.config.num_hidden_layers
        add_adapters(model, LORA, torch.float32)
        self.backend = build_backend(
            model, BackendConfig(), CPU, Training(OptimConfig(), grad_clip=1.0, total_optimizer_steps=1)
        )
        fill_from_seed(self.backend.model_shards(), seed=1)

    def move(self) -> None:
        """Change the adapters, as if trained a little."""
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for shard in self.backend.model_shards().values():
                shard.local.add_(0.05 * torch.randn(shard.local.shape, generator=generator))

    def merged(self) -> PreTrainedModel:
        """Return the model with the adapters merged into the base."""
        model = policy()
        model.load_state_dict(dict(self.backend.full_tensors()), strict=False)
        return model


def flipped(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.clone()
    changed.view(torch.int32).view(-1)[3] ^= 1
    return changed


@pytest.mark.parametrize(
    ("arriving", "message"),
    [
        # In each layer, vLLM's qkv_proj, o_proj, gate_up_proj and down_proj are old. No other weight has changed.
        (lambda old, name, weight: None, "the engine still has the old values: {} ("),
        (
            lambda old, name, weight: None if name == DOWN else weight,
            f"the engine still has the old values: 1 ({DOWN})",
        ),
        (lambda old, name, weight: flipped(weight) if name == NORM else weight, f"nor the values sent: 1 ({NORM})"),
    ],
    ids=["nothing", "one not", "a bit"],
)
def test_a_server_that_does_not_hold_what_it_was_sent_serves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, arriving: Any, message: str
):
    """The policy has merged adapters. The server receives other weights than those that the digests describe."""
    server.wait()
    url = server.process.url
    weight_push = WeightPush(settings(), CPU, SECRET, bucket_bytes=SMALL_BUCKETS)
    with single_rank():
        adapted = Adapted()
        assert weight_push.send([url], adapted.backend.full_tensors(), "old").errors == {url: None}
        held = {name: weight.clone() for name, weight in adapted.backend.full_tensors()}
        adapted.move()

        def save_others(bucket: dict[str, torch.Tensor]) -> bytes:
            loaded = {name: arriving(held, name, weight) for name, weight in bucket.items()}
            return save_tensors({name: weight for name, weight in loaded.items() if weight is not None})

        with monkeypatch.context() as patched:
            patched.setattr(push_module, "save", save_others)
            reason = str(weight_push.send([url], adapted.backend.full_tensors(), "new").errors[url])
        assert "/finish_weight_update failed with HTTP 500" in reason
        assert "The rollout engine does not have the weights that the trainer sent (new)." in reason
        assert message.format(4 * adapted.layers) in reason
        asked = server.request("/inference/v1/generate", b'{"token_ids": [5], "sampling_params": {"max_tokens": 1}}')
        with pytest.raises((TimeoutError, HTTPError)):  # vLLM 0.33 answers at once that it is paused
            urllib.request.urlopen(asked, timeout=0.5)
        with urllib.request.urlopen(server.request("/weight_info"), timeout=ANSWER_S) as response:
            assert json.load(response) == {"weight_version": UNFINISHED}
        assert weight_push.send([url], adapted.backend.full_tensors(), "new").errors == {url: None}
        assert server.greedy() == (embedded(adapted.merged()), {"new"})
        assert server.greedy()[0] != embedded(policy())


def test_an_adopted_server_aborts_the_requests_of_a_dead_trainer_and_serves_its_weights(server: Server):
    server.wait()
    url, old = server.process.url, policy()
    weight_push = WeightPush(settings(), CPU, SECRET)
    pushed = weight_push.send([url], old.named_parameters(), "mine")
    assert pushed.errors == {url: None}
    assert pushed.label == weight_push.label(old.named_parameters(), "mine")
    assert pushed.label != weight_push.label(policy(changed=True).named_parameters(), "mine")
    weight_push._control.post(url, "/pause?mode=keep")  # in other modes, vLLM 0.33 rejects new requests

    def left_over() -> str:
        body = json.dumps({"token_ids": prompts()[0], "sampling_params": {"max_tokens": RESPONSE, "logprobs": 0}})
        with urllib.request.urlopen(server.request("/inference/v1/generate", body.encode()), timeout=ANSWER_S) as found:
            return json.load(found)["choices"][0]["finish_reason"]

    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(left_over)
        time.sleep(2)
        assert not request.done(), "a paused server answers"
        assert weight_push.adopt([url]) == {url: None}
        assert request.result() == "abort"
    assert server.greedy() == (embedded(old), {"mine"})


def test_an_error_of_the_weights_themselves_propagates(server: Server):
    server.wait()
    url, old = server.process.url, policy()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(old.named_parameters())[:3]
        raise RuntimeError("a rank is lost")

    weight_push = WeightPush(settings(), CPU, SECRET, bucket_bytes=SMALL_BUCKETS)
    with pytest.raises(RuntimeError, match="a rank is lost"):
        weight_push.send([url], weights(), "half")
    assert weight_push.send([url], old.named_parameters(), "again").errors == {url: None}
    assert server.greedy() == (embedded(old), {"again"})


def test_a_killed_server_leaves_nothing_behind(server: Server):
    server.wait()
    process = kept(server.process).process
    group = processes_of(process.pid)
    assert len(group) > 2
    os.kill(process.pid, signal.SIGKILL)
    end = time.monotonic() + 120
    while processes_of(process.pid):
        assert time.monotonic() < end, f"{processes_of(process.pid)} of {group} outlive their server"
        time.sleep(0.05)
    assert server.process.poll() == -signal.SIGKILL
    first = server.process.url
    server.process.start()
    assert server.process.url != first
    time.sleep(3)  # the server is still importing
    again = kept(server.process).process
    server.process.kill()
    assert not processes_of(again.pid)
    assert server.process.poll() == -signal.SIGKILL
