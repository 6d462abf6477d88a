"""Serves weights over HTTP under an unguessable path; the receiver verifies secret and hash. Imports no torch."""

import hmac
import secrets
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import xxhash

from rlhf.rollout.servers.secret import nonce_hmac

_CHUNK = 1 << 20
_NONCE, _HMAC = "X-Rlhf-Nonce", "X-Rlhf-Proof"


class WeightServer:
    """Serves bytes over HTTP at one address of this machine, inside the context of `serve`; signs each response."""

    def __init__(self, address: str, timeout_s: float, secret: str) -> None:
        self._served: dict[str, bytes] = {}
        served = self._served

        class Handler(BaseHTTPRequestHandler):
            timeout = timeout_s  # closes the connection of a peer that stops reading

            def do_GET(self) -> None:
                data = served.get(self.path)
                if data is None:
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Length", str(len(data)))
                self.send_header(_HMAC, nonce_hmac(secret, self.headers.get(_NONCE, ""), self.path))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing, because the receiver reports a failed download."""

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:
                    """Do nothing: the peer has gone, so no process could receive a report."""

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        self._address = address
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @contextmanager
    def serve(self, data: bytes) -> Iterator[str]:
        """Serve `data` inside the context; yield its URL."""
        path = f"/{secrets.token_urlsafe(32)}"
        self._served[path] = data
        try:
            yield f"http://{self._address}:{self._server.server_port}{path}"
        finally:
            del self._served[path]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def address_towards(url: str) -> str:
    """Return the IPv4 address at which the host of `url` reaches this machine; raise OSError for an unknown host."""
    parts = urlsplit(url)
    assert parts.hostname
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends no packet, but the kernel selects an interface
        return probe.getsockname()[0]


def fetch(url: str, size: int, xxh3_128: str, timeout_s: float, secret: str | None) -> bytes:
    """Return the `size` bytes at `url` from a trainer with `secret`; None accepts any trainer.

    Raises OSError if bytes are missing, arrive after `timeout_s` or do not match the hash, or if the trainer lacks the
    secret.
    """
    deadline = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    data, digest = bytearray(), xxhash.xxh3_128()
    nonce = secrets.token_hex(16)
    with opener.open(urllib.request.Request(url, headers={_NONCE: nonce}), timeout=timeout_s) as response:
        shown = response.headers.get(_HMAC, "")
        if secret is not None and not hmac.compare_digest(
            shown.encode(), nonce_hmac(secret, nonce, urlsplit(url).path).encode()
        ):
            raise PermissionError("The trainer that offers the weights does not have this server's secret.")
        while chunk := response.read1(min(_CHUNK, size + 1 - len(data))):
            data += chunk
            digest.update(chunk)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(data)} of {size} bytes of weights arrived within {timeout_s:g} s.")
    if len(data) != size or digest.hexdigest() != xxh3_128:
        raise OSError(f"The {len(data)} bytes of weights that arrived are not the {size} that were announced.")
    return bytes(data)
