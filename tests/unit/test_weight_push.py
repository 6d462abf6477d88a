"""Weights cut into buckets, and their way from a trainer to a server."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler
from typing import Any

import pytest
import torch
import xxhash

from rlhf.config import RolloutConfig
from rlhf.rollout.servers.control import CallFailed, ServerControl, in_parallel
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.weights.pull import WeightServer, address_towards, fetch
from rlhf.rollout.servers.weights.push import WeightPush, buckets

CPU = torch.device("cpu")
HERE = "127.0.0.1"
SECRET = Secret("of-this-run-alone", "here")


def test_buckets_hold_everything_in_order_and_stay_below_the_limit():
    tensors = [(f"w{i}", torch.full((size,), float(i))) for i, size in enumerate([4, 4, 1, 30, 2, 8])]
    cut = list(buckets(tensors, torch.float32, CPU, 4 * 8))
    assert [list(bucket) for bucket in cut] == [["w0", "w1"], ["w2"], ["w3"], ["w4"], ["w5"]]
    assert all(torch.equal(bucket[name], tensor) for name, tensor in tensors for bucket in cut if name in bucket)
    # Tensors in bfloat16 have half the bytes, so a bucket has room for twice as many.
    halves = list(buckets(tensors, torch.bfloat16, CPU, 4 * 8))
    assert [list(bucket) for bucket in halves] == [["w0", "w1", "w2"], ["w3"], ["w4", "w5"]]
    assert {tensor.dtype for bucket in halves for tensor in bucket.values()} == {torch.bfloat16}


def test_a_bucket_keeps_what_the_trainer_reuses_and_integers_as_they_are():
    shared = torch.zeros(3)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for value in range(3):
            yield f"w{value}", shared.fill_(value)
        yield "transposed", torch.arange(6).reshape(2, 3).T

    (bucket,) = buckets(gathered(), torch.float32, CPU, 1 << 20)
    assert [float(bucket[f"w{value}"][0]) for value in range(3)] == [0.0, 1.0, 2.0]
    assert bucket["transposed"].dtype == torch.int64
    assert bucket["transposed"].is_contiguous()


def test_weights_are_walked_to_their_end_without_any_server():
    walked = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            walked.append(name)
            yield name, torch.zeros(2)

    nobody = f"http://{HERE}:9"
    outcome = WeightPush(RolloutConfig(), CPU, SECRET).send([nobody], weights(), "1")
    assert "refused" in (outcome.errors[nobody] or "")
    assert walked == ["a", "b"]


@pytest.fixture
def weight_server() -> Iterator[WeightServer]:
    made = WeightServer(HERE, 5, SECRET.value)
    yield made
    made.close()


def about(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data), "timeout_s": 5.0, "secret": SECRET.value}


def test_what_is_lent_arrives_and_only_while_it_is_lent(weight_server: WeightServer):
    data = bytes(range(256)) * 20_000
    with weight_server.serve(data) as url, weight_server.serve(b"other") as other:
        assert fetch(url, **about(data)) == data
        assert fetch(other, **about(b"other")) == b"other"
    for gone in (url, url.rpartition("/")[0] + "/"):
        with pytest.raises(OSError, match="404"):
            fetch(gone, **about(data))


@pytest.mark.parametrize("of", ["of-another-run-alone", None])
def test_weights_are_fetched_only_from_the_trainer_that_holds_the_secret(of: str | None):
    """`of` is another run's secret; with None, a server without a secret answers at the URL."""
    other = WeightServer(HERE, 5, of) if of else None
    plain = HTTPServer((HERE, 0), SimpleHTTPRequestHandler)
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    try:
        with other.serve(b"weights") if other else nullcontext(f"http://{HERE}:{plain.server_port}/") as url:
            with pytest.raises(PermissionError, match="does not have this server's secret"):
                fetch(url, **about(b"weights"))
            if other:  # a receiver without a secret accepts weights from any server
                assert fetch(url, **(about(b"weights") | {"secret": None})) == b"weights"
    finally:
        plain.shutdown()
        plain.server_close()
        if other:
            other.close()


@pytest.mark.parametrize("sent", [b"weightx", b"weight", b"weights and more", b""])
def test_other_bytes_than_those_announced_are_refused(weight_server: WeightServer, sent: bytes):
    with weight_server.serve(sent) as url, pytest.raises(OSError, match="not the 7 that were announced"):
        fetch(url, **about(b"weights"))


def test_bytes_that_drip_end_at_the_deadline():
    """Each read is quick, but all reads together take longer than the deadline."""
    listener = socket.create_server((HERE, 0))
    stop = threading.Event()

    def drip() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while not stop.is_set():
                try:
                    peer.sendall(b"x")
                except OSError:
                    return
                time.sleep(0.02)

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(OSError, match=r"of 1000000 bytes|timed out"):
            fetch(f"http://{HERE}:{listener.getsockname()[1]}/", 1_000_000, "", timeout_s=0.3, secret=None)
    finally:
        stop.set()
        thread.join()
        listener.close()


def test_a_server_of_this_machine_finds_the_trainer_where_it_is():
    assert address_towards(f"http://{HERE}:8000") == HERE
    assert address_towards("http://localhost") == HERE
    with pytest.raises(OSError, match=r".+"):
        address_towards("http://no-such-host.invalid:8000")


class PickyServer(HTTPServer):
    def __init__(self) -> None:
        self.shown: list[tuple[str, str | None]] = []
        super().__init__((HERE, 0), Picky)


class Picky(BaseHTTPRequestHandler):
    server: PickyServer

    def do_POST(self) -> None:
        self.server.shown.append((self.path, self.headers.get("Authorization")))
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/silent":
            time.sleep(1)
        self.send_response(500 if self.path == "/bad" else 200)
        self.end_headers()
        self.wfile.write(b"because" if self.path == "/bad" else b"{}")

    def do_GET(self) -> None:
        self.server.shown.append((self.path, self.headers.get("Authorization")))
        self.send_response(302 if self.path == "/elsewhere" else 200)
        self.send_header("Location", "/good")
        self.end_headers()
        self.wfile.write(b'{"answer": 42}' if self.path == "/good" else b"<html>")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_calls_name_what_failed_and_do_not_wait_for_ever():
    server = PickyServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    url, nobody = f"http://{HERE}:{server.server_port}", f"http://{HERE}:9"
    try:
        control = ServerControl(SECRET, 5)
        control.post(url, "/good")
        assert control.get(url, "/good") == {"answer": 42}
        with pytest.raises(CallFailed, match="/bad failed with HTTP 500: b'because'"):
            control.post(url, "/bad")
        with pytest.raises(CallFailed, match="/page answered b'<html>'"):
            control.get(url, "/page")
        assert in_parallel(lambda to: control.post(to, "/good"), [url, nobody]).keys() == {nobody}
        with pytest.raises(CallFailed, match="timed out"):
            ServerControl(SECRET, 0.2).post(url, "/silent")
        with pytest.raises(CallFailed, match="/elsewhere failed with HTTP 302"):
            control.get(url, "/elsewhere")
        # Every request has the secret, and no redirection passes it on.
        assert {path for path, _ in server.shown} >= {"/good", "/bad", "/page", "/silent", "/elsewhere"}
        assert {shown for _, shown in server.shown} == {"Bearer of-this-run-alone"}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
