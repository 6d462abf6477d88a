"""Serves the report of runs to browsers on this machine: read-only, on the loopback interface, under a secret key."""

import hmac
import html
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlhf.errors import UserError
from rlhf.tracking.page.page import page_of

HOST = "127.0.0.1"
FRESH_S = 2.0
"""For this many seconds, the server sends a page again instead of composing a new one."""
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer(ThreadingHTTPServer):
    """Serves the page of `runs` at `address`, which contains the key, and answers every other request with 404."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self._runs, self._lock = runs, threading.Lock()
        self._page, self._made_at = b"", -FRESH_S
        self.key = secrets.token_urlsafe(24)
        self.host = f"{HOST}:{self.server_address[1]}"
        self.address = f"http://{self.host}/{self.key}/"

    def page(self) -> bytes:
        """Return the page, at most FRESH_S seconds old. If files are damaged, return a page with the error."""
        with self._lock:
            if time.monotonic() - self._made_at >= FRESH_S:
                try:
                    self._page = page_of(self._runs, live=True).encode(errors="replace")
                except (UserError, OSError) as error:  # TimeoutError is an OSError
                    self._page = f"<!doctype html><title>rlhf</title><pre>{html.escape(str(error))}</pre>".encode()
                self._made_at = time.monotonic()
            return self._page


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30  # seconds until a connection that sends nothing is closed

    def do_GET(self) -> None:
        """Send the page if the address has the key."""
        # Check the host, too: another website can point its own host name to 127.0.0.1 and so reach this server.
        known = hmac.compare_digest(self.path.encode(), f"/{self.server.key}/".encode())
        if not known or self.headers.get("Host") != self.server.host:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        page = self.server.page()
        self.send_response(HTTPStatus.OK)
        for name, value in {**_HEADERS, "Content-Length": str(len(page))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""


def serve(runs: Sequence[Path], port: int) -> None:
    """Print the address and serve the page of `runs` until Ctrl-C.

    Raises:
        UserError: the server cannot listen at the port, or a run cannot be read.
    """
    page_of(runs)
    try:
        server = PageServer(runs, port)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port={port}: cannot listen ({error}). Give another port, or none.") from None
    with server:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        server.serve_forever()
