"""A rollout server without a model: vLLM's routes, real time, and tokens that follow from the request's seed.

The log-prob of each token encodes the version of the weights (`log_prob_of`), so that a test can check the version.
The server downloads adapters, and answers only requests that name loaded adapters or none.
"""

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlhf.rollout.servers.weights.adapter_message import AdapterMessage, parse_address
from rlhf.rollout.servers.weights.pull import fetch

DIGITS = range(20, 30)
"""Ids of the tokens that the server draws, all of them digits of the bundled policy."""
EOS, DEADLINE_S = 1, 60.0
STEP = re.compile(r"\.step_(\d+)")
"""The number of steps in a label."""


def log_prob_of(version: int) -> float:
    """Return the log-prob of tokens by the weights after `version` steps, exact in float32."""
    return -1.0 - version / 64


def version_of(log_prob: float) -> int:
    return round((-1.0 - log_prob) * 64)


class ScriptedVllm(ThreadingHTTPServer):
    """Draws one token of each running request every `token_s` seconds. One response in eight has
    `longest` tokens, the others at most a sixth of them. While `silent`, the server answers no probe."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, token_s: float = 0.004, longest: int = 16, port: int = 0) -> None:
        self.token_s, self.longest, self.label, self.tokens = token_s, longest, "default", 0
        self.aborted: dict[str, threading.Event] = {}
        """Events of the running requests, by name."""
        self.resumed = threading.Event()
        self.resumed.set()
        self.answers: list[str] = []
        """Finish reasons of all answers."""
        self.calls: list[str] = []
        """Paths of all calls that change the server's state."""
        self.adapters: dict[str, AdapterMessage] = {}
        """Loaded adapters by name."""
        self.serves_adapters = True
        self.sampling_mask = False
        """Whether answers have sampling masks, as with --return-sampling-mask."""
        self.dead, self.silent = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def die(self) -> None:
        """Break all connections, and answer nothing from now on."""
        self.dead.set()
        for event in list(self.aborted.values()):
            event.set()

    def close(self) -> None:
        self.die()
        self.shutdown()
        self.server_close()

    def called(self, path: str) -> None:
        """Record a call that changes the server's state."""
        self.calls.append(path)

    def abort(self, names: Sequence[str]) -> None:
        """Make the running requests among `names` answer with the tokens so far."""
        with self.lock:
            for name in names:
                if name in self.aborted:
                    self.aborted[name].set()

    def load_adapter(self, body: dict[str, Any], secret: str) -> None:
        """Download adapters, as `/v1/load_lora_adapter` does."""
        data = fetch(**parse_address(body["lora_path"]), secret=secret)
        self.adapters[body["lora_name"]] = AdapterMessage.decode(data)

    def generated(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the choice for a request, after its time."""
        params, name = body["sampling_params"], f"generate-tokens-{body['request_id']}"
        with self.lock:
            stop, label = self.aborted.setdefault(name, threading.Event()), self.label
        bits = hashlib.sha256(str(params["seed"]).encode()).digest() * 8
        wanted = self.longest if bits[0] % 8 == 0 else 1 + bits[1] % max(1, self.longest // 6)
        length = min(wanted, params["max_tokens"])
        began = time.monotonic()
        interrupted = stop.wait(length * self.token_s)
        done = min(int((time.monotonic() - began) / self.token_s), length - 1) if interrupted else length
        with self.lock:
            self.tokens += done
            del self.aborted[name]
            reason = "abort" if interrupted else "stop" if wanted <= params["max_tokens"] else "length"
            self.answers.append(reason)
        ids = [DIGITS[bits[i % 256] % 10] for i in range(2, 2 + done)]
        if reason == "stop":
            ids[-1] = EOS
        log_prob = log_prob_of(int(STEP.findall(label)[0]))
        kept = [[token, *(DIGITS[(token + bits[i]) % 10] for i in range(bits[token] % 3))] for token in ids]
        return {
            "index": 0,
            "token_ids": ids,
            "finish_reason": reason,
            "logprobs": {"content": [{"token_id": token, "logprob": log_prob} for token in ids]},
            "weight_versions": [{"version": label, "start": 0, "end": done}] if done else None,
        } | ({"sampling_mask": [sorted(set(each)) for each in kept]} if self.sampling_mask else {})


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedVllm

    def do_GET(self) -> None:
        server = self.server
        if server.silent.is_set():
            self.send_error(503)
            return
        if self.path == "/metrics":
            running = len(server.aborted)
            self.answer(f"vllm:generation_tokens_total{{}} {server.tokens}\nvllm:num_requests_running{{}} {running}\n")
            return
        if self.path == "/v1/load_lora_adapter":
            self.send_error(405 if server.serves_adapters else 404)
            return
        answers: dict[str, dict[str, Any]] = {
            "/version": {"version": "0.32.0"},
            "/weight_info": {"weight_version": server.label},
            "/health": {},
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 256}]},
        }
        self.answer(json.dumps(answers[self.path]))

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/inference/v1/generate":
            if not server.resumed.is_set():  # as vLLM 0.33; earlier releases let the request wait
                self.send_error(503)
                return
            if "model" in body and body["model"] not in server.adapters:
                self.send_error(404)
                return
            self.answer(json.dumps({"choices": [server.generated(body)]}))
            return
        server.called(self.path)
        if self.path == "/abort_requests":
            server.abort(body["request_ids"])
        elif self.path.startswith("/pause?mode=abort"):
            server.resumed.clear()
            server.abort(list(server.aborted))
        elif self.path == "/resume":
            server.resumed.set()
        elif self.path == "/update_weight_version":
            server.label = body["new_version"]
        elif self.path == "/finish_weight_update":
            server.label = body["weight_version"]
        elif self.path == "/v1/load_lora_adapter":
            server.load_adapter(body, self.headers["Authorization"].removeprefix("Bearer "))
        elif self.path == "/v1/unload_lora_adapter" and server.adapters.pop(body["lora_name"], None) is None:
            self.send_error(404)
            return
        self.answer("{}")

    def answer(self, text: str) -> None:
        with suppress(OSError):  # the trainer may be gone
            if self.server.dead.is_set():
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
