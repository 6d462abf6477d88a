"""Fleet whose servers fail, and settings of a server's start. tests/faults/test_vllm_servers.py has working servers."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.schema.rollout import RolloutConfig, ServersConfig
from rlhf.errors import UserError
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.servers.client import RequestSettings
from rlhf.rollout.servers.fleet import Fleet
from rlhf.rollout.servers.fleet_loop import FleetLoop, ServersFailed
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.server_engine import server_gpus
from tests.support.refusals import says, user_error
from tests.support.tcp_proxy import Proxy

DEADLINE_S, LONGEST = 60.0, 48
HERE = "127.0.0.1"
SECRET = Secret("of-this-run-alone", "RUN/secret")


@contextmanager
def fleet(settings: ServersConfig, processes: dict[Path, Any]) -> Iterator[Fleet]:
    made = Fleet(FleetLoop(settings, processes, RequestSettings([1], {}, 10, longest=LONGEST), SECRET, capacity=4))
    try:
        yield made
    finally:
        made.close()


def limits(**changes) -> ServersConfig:
    return ServersConfig(max_failures=2, backoff_s=0.0, backoff_max_s=0.0, answer_timeout_s=5.0, **changes)


class Ends:
    """A process that ends at once."""

    url = "http://127.0.0.1:9"

    def __init__(self) -> None:
        self.started: list[subprocess.Popen] = []

    def adopt(self) -> bool:
        return False

    def start(self) -> None:
        self.started.append(subprocess.Popen(["false"]))

    def poll(self) -> int | None:
        return self.started[-1].poll()

    def kill(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


def test_processes_that_end_spend_the_budget_and_the_error_says_where_to_look():
    one, log = Ends(), Path("run/rollout_servers/server_0.log")
    with fleet(limits(), {log: one}) as it, pytest.raises(ServersFailed) as caught:
        it.wait(DEADLINE_S, generating=False)
    assert len(one.started) == 3
    message = str(caught.value)
    assert "failed 3 times" in message
    assert "rollout.servers.max_failures=2" in message
    assert f"{one.url}: dead; its process ended with exit code 1;" in message
    assert f"log: {log}" in message
    assert all(process.poll() is not None for process in one.started)


def test_urls_at_which_nobody_answers_are_waited_for_and_then_given_up(caplog):
    with fleet(limits(start_timeout_s=0.1, urls=["http://127.0.0.1:9/"]), {}) as it:
        with pytest.raises(ServersFailed) as caught:
            it.wait(DEADLINE_S, generating=False)
        assert it.do(lambda loop: loop.begin_push("w1", 1)) == {}
        assert it.do(FleetLoop.metrics)["perf/servers_serving"] == 0
    assert "http://127.0.0.1:9: dead; did not get ready in time" in str(caught.value)
    assert "ClientConnectorError" in str(caught.value)
    assert "given by rollout.servers.urls" in str(caught.value)
    # A wrong address is named at once, not only after the deadline.
    (warning,) = [r.getMessage() for r in caplog.records if "Is it running?" in r.getMessage()]
    assert "http://127.0.0.1:9 (rollout.servers.urls): " in warning
    assert "start_timeout_s=0.1 " in warning


def test_a_fleet_gives_up_only_while_a_caller_waits():
    one = Ends()
    with fleet(limits(), {Path("log"): one}) as it:
        end = time.monotonic() + DEADLINE_S
        while len(one.started) < 5 and time.monotonic() < end:
            time.sleep(0.01)
        assert it.do(FleetLoop.metrics)["perf/server_restarts"] >= 4


def test_an_unsupported_release_is_the_users_mistake():
    class Old(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"version": "0.11.0"}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Old)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with (
        fleet(limits(urls=[url]), {}) as it,
        pytest.raises(UserError, match=rf"{url} cannot be used: it runs vLLM 0\.11\.0"),
    ):
        it.wait(DEADLINE_S, generating=False)
    server.shutdown()
    server.server_close()


class Slow(ThreadingHTTPServer):
    """A server with the weights `w1` that returns samples only after `counts` reads of its count of tokens.

    Each read raises the count by one if `alive`. `wants` is the header Authorization that reads need.
    """

    daemon_threads = True

    def __init__(self, counts: int, *, alive: bool, wants: str | None = None, length: int = LONGEST) -> None:
        self.counts, self.alive, self.counted = counts, alive, 0
        self.wants, self.length = wants, length
        self.enough = threading.Event()
        super().__init__((HERE, 0), SlowHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class SlowHandler(BaseHTTPRequestHandler):
    server: Slow

    def do_GET(self) -> None:
        slow, label, vllm = self.server, {"weight_version": "w1"}, {"version": "0.32.0"}
        if slow.wants not in (None, self.headers.get("Authorization")):
            self.send_error(401)
            return
        if self.path == "/metrics":
            slow.counted += 1
            if slow.counted >= slow.counts:
                slow.enough.set()
            self.answer(f"vllm:generation_tokens_total{{}} {slow.counted if slow.alive else 7}\n")
        else:
            models = {"data": [{"id": "policy", "max_model_len": slow.length}]}
            answers = {"/version": vllm, "/weight_info": label, "/health": {}, "/v1/models": models}
            self.answer(json.dumps(answers[self.path]))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.enough.wait(DEADLINE_S)
        token = {"token_id": 4, "logprob": -0.5}
        span = {"version": "w1", "start": 0, "end": 1}
        choice = {"index": 0, "token_ids": [4], "finish_reason": "stop", "weight_versions": [span]}
        self.answer(json.dumps({"choices": [choice | {"logprobs": {"content": [token]}}]}))

    def answer(self, text: str) -> None:
        with suppress(OSError):  # the client may have disconnected
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("hangs", ["nothing", "engine", "network"])
def test_a_busy_server_is_waited_for_and_one_that_hangs_is_not(hangs):
    """With `engine`, the engine hangs while HTTP still answers."""
    alive = hangs == "nothing"
    # Read 1 checks the new server, read 2 is the baseline of the progress. Five more reads outlast the deadline,
    # which spans four.
    server, proxy, limit_s = Slow(counts=2 + 5 if alive else 1000, alive=hangs != "engine"), Proxy(), 3.0
    proxy.upstream = f"http://{HERE}:{server.server_port}"
    if hangs == "network":
        proxy.arm(1, proxy.hang)
    settings = ServersConfig(max_failures=0, answer_timeout_s=limit_s, urls=[proxy.url])
    with fleet(settings, {}) as it:
        assert it.wait(DEADLINE_S, generating=False) == "ready"
        urls = it.do(lambda loop: loop.begin_push("w1", 1))
        it.do(lambda loop: loop.end_push("w1", dict.fromkeys(urls)))
        began = time.monotonic()
        it.do(lambda loop: loop.begin([Request(7, [1, 2], SamplingParams(max_tokens=4))], seed=1, step=1))
        if alive:
            assert it.wait(DEADLINE_S) == "done"
            assert time.monotonic() - began > limit_s
            assert [sample.token_ids.tolist() for sample in it.do(FleetLoop.pop_samples)] == [[4]]
            assert it.do(FleetLoop.metrics)["perf/server_failures"] == 0
        else:
            with pytest.raises(ServersFailed, match="hung: 1 requests, and for 3 s no answer and no token"):
                it.wait(DEADLINE_S)
    proxy.resume()
    server.enough.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def slow():
    """Yield the URL of a server that never answers a request."""
    server = Slow(counts=1000, alive=True)
    yield f"http://{HERE}:{server.server_port}"
    server.enough.set()
    server.shutdown()
    server.server_close()


def test_pushes_that_fail_spend_the_budget(slow):
    """A server that cannot fetch weights must not be waited for without end."""
    with fleet(limits(urls=[slow]), {}) as it:
        assert it.wait(DEADLINE_S, generating=False) == "ready"
        it.do(lambda loop: loop.begin_push("w2", 2))
        it.do(lambda loop: loop.begin([Request(7, [1, 2], SamplingParams(max_tokens=4))], seed=1, step=1))
        for _ in range(limits().max_failures):
            it.do(lambda loop: loop.end_push("w2", {slow: "connection refused"}))
            assert it.wait(DEADLINE_S) == "weights"
            assert it.do(lambda loop: loop.begin_push("w2", 2)) == {slow: "w1"}
        it.do(lambda loop: loop.end_push("w2", {slow: "connection refused"}))
        with pytest.raises(ServersFailed, match="connection refused"):
            it.wait(DEADLINE_S)


def test_a_generation_can_be_stopped_when_all_servers_have_failed(slow):
    """SIGTERM to a whole job ends servers and ranks together; the ranks must still save."""
    with fleet(limits(urls=[slow]), {}) as it:
        assert it.wait(DEADLINE_S, generating=False) == "ready"
        it.do(lambda loop: loop.begin([Request(7, [1, 2], SamplingParams(max_tokens=4))], seed=1, step=1))
        it.do(lambda loop: setattr(loop._budget, "in_a_row", limits().max_failures + 1))
        it.do(FleetLoop.stop)
        assert it.wait(DEADLINE_S) == "done"
        assert [sample.finish_reason for sample in it.do(FleetLoop.pop_samples)] == ["partial"]


@pytest.mark.parametrize("wants", [None, "Bearer of-this-run-alone", "Bearer of-another-run"])
def test_a_server_given_by_url_should_ask_for_a_secret_which_is_this_runs(wants, caplog):
    server = Slow(counts=1, alive=True, wants=wants)
    url = f"http://{HERE}:{server.server_port}"
    with fleet(limits(urls=[url]), {}) as it:
        if wants == "Bearer of-another-run":
            with pytest.raises(UserError, match=rf"{url} expects another secret .*RUN/secret.* RLHF_ROLLOUT_SECRET"):
                it.wait(DEADLINE_S, generating=False)
        else:
            assert it.wait(DEADLINE_S, generating=False) == "ready"
    logged = [record.getMessage() for record in caplog.records if "asks for no secret" in record.getMessage()]
    assert len(logged) == (wants is None)
    assert all(url in text and "RUN/secret" in text and "RLHF_ROLLOUT_SECRET" in text for text in logged)
    assert SECRET.value not in caplog.text
    server.shutdown()
    server.server_close()


def test_a_server_that_would_cut_responses_is_the_users_mistake():
    server = Slow(counts=1, alive=True, length=LONGEST - 1)
    url = f"http://{HERE}:{server.server_port}"
    with fleet(limits(urls=[url]), {}) as it:
        names = (url, "--max-model-len=47", "data.max_prompt_length", "data.max_response_length is 48", "-len 48 or")
        says(user_error(lambda: it.wait(DEADLINE_S, generating=False)), *names)
    server.shutdown()
    server.server_close()


def test_waiting_for_servers_returns_none_at_the_time_limit():
    with fleet(limits(urls=["http://127.0.0.1:9"]), {}) as it:
        assert it.wait(0.1, generating=False) is None


def test_a_closed_fleet_says_so():
    with fleet(limits(urls=["http://127.0.0.1:9"]), {}) as it:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        it.wait(0.1)


def test_servers_get_the_gpus_after_those_of_the_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = RolloutConfig(servers=ServersConfig(count=3), tensor_model_parallel_size=2)
    cuda = torch.device("cuda", 0)
    assert server_gpus(config, cuda) == [["2", "3"], ["4", "5"], ["6", "7"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,GPU-0")
    assert server_gpus(config, cuda) == [["5", "4"], ["3", "2"], ["1", "GPU-0"]]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(
        UserError, match=r"servers\.count=3.* need 6 GPUs .* the 3 ranks .* has 8\. Set trainer\.nproc=2"
    ):
        server_gpus(config, cuda)
    assert server_gpus(config, torch.device("cpu")) == [[], [], []]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as with srun --gpus-per-task=1
    says(user_error(server_gpus, config, cuda), "servers.count=3", "3 ranks", "one GPU", "all GPUs", "rollout=vllm")


def test_the_vocabulary_of_a_model_with_several_parts():
    def of(config: bytes) -> int:
        return PolicyFiles({"config.json": config}, Path("model"), [1], 64).vocab_size

    assert of(b'{"vocab_size": 5}') == 5
    assert of(b'{"text_config": {"vocab_size": 6}}') == 6
