"""Receives alerts over HTTP for tests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class AlertServer(ThreadingHTTPServer):
    """Stores the alerts that it receives. Answers with `answers` in turn, later with 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.hangs = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/services/T0123/s3cr3t-token-in-the-path"

    @property
    def kinds(self) -> list[str]:
        return [alert["alert"] for alert in self.received]


class Handler(BaseHTTPRequestHandler):
    server: AlertServer

    def do_POST(self) -> None:
        alert = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.hangs.is_set():
            threading.Event().wait(60)
        status = self.server.answers.pop(0) if self.server.answers else 200
        if status == 200:
            self.server.received.append(alert)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if status == 302:
            self.send_header("Location", self.server.url)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def alert_server() -> Iterator[AlertServer]:
    server = AlertServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
