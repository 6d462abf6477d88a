"""Serves OpenAI's chat protocol and vLLM's token protocol on loopback, for the program of one episode."""

import hmac
import json
import queue
import secrets
import select
import socket
import socketserver
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlhf.environments.chat_protocol import chunks
from rlhf.environments.token_protocol import token_chunks
from rlhf.typed_json import is_deep

CHAT = "/v1/chat/completions"
STREAMS = {CHAT: chunks, "/inference/v1/generate": token_chunks}
"""The paths of requests to the policy, each with a function that streams an answer."""
MAX_REQUEST_BYTES = 1 << 22
"""Largest request. As ASCII JSON it is up to three times as long, and must fit into `sessions.MAX_REPLY_BYTES`."""
RETRIES = "x-stainless-retry-count"
"""The header in which OpenAI's client counts how often it has sent a request before."""
IDLE_S = 600.0
"""Seconds after which the server closes a connection that sends nothing."""


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for its answer."""

    path: str
    body: Any
    too_deep: bool = False
    """Whether the body is nested too deeply; `body` is then None."""
    overlaps: bool = False
    """Whether the request came before the answer to another request."""
    is_retry: bool = False
    """Whether the client says that it sends the request again."""
    connection: socket.socket | None = None
    lost: bool = False
    """Whether the client closed its connection before it received the answer."""
    answer: dict[str, Any] | None = None
    """The completion, or `error`."""
    done: threading.Event = field(default_factory=threading.Event)

    def repeats(self, other: "PendingRequest") -> bool:
        """Return whether a client sends `other` again, because it has no answer. Otherwise an equal request is new."""
        is_retry = self.is_retry or other.lost or self.lost  # requests of closed connections may arrive late
        return is_retry and (self.path, self.body) == (other.path, other.body)

    def look(self) -> None:
        """Set `lost` if the client has closed its connection. The answer must not be sent yet."""
        self.lost = self.lost or (self.connection is not None and _is_closed(self.connection))

    def reply(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.done.set()

    def reject(self, why: str, code: str = "invalid_request") -> None:
        self.reply({"error": {"message": why, "type": "invalid_request_error", "code": code}})

    def end(self) -> None:
        """Answer that the episode has ended, in the form in which OpenAI's servers report a full context."""
        self.reject("the episode has ended: no turn, row or token is left", "context_length_exceeded")


class ChatEndpoint:
    """An HTTP server with one API key. `requests` receives each `PendingRequest`, in the order of arrival."""

    def __init__(self, requests: "queue.Queue[Any]") -> None:
        self.key = secrets.token_hex(16)
        self._requests = requests
        self._lock = threading.Lock()
        self._waiting: list[PendingRequest] = []
        self._closed = False
        self._server = _ChatServer(self)

    def start(self) -> None:
        """Start to answer requests, beginning with those that arrived before this call."""
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 60.0}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def ask(self, pending: PendingRequest) -> dict[str, Any]:
        """Queue a request and return its answer."""
        with self._lock:
            if self._closed:
                pending.end()
            else:
                for each in (*self._waiting, pending):
                    each.look()
                pending.overlaps = any(not (pending.repeats(each) or each.done.is_set()) for each in self._waiting)
                self._waiting.append(pending)
                self._requests.put(pending)
        pending.done.wait()
        with self._lock:
            pending.look()
            if pending in self._waiting:
                self._waiting.remove(pending)
        assert pending.answer is not None
        return pending.answer

    def end(self) -> None:
        """Answer all waiting and all further requests with the end of the episode."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for pending in waiting:
            if not pending.done.is_set():
                pending.end()

    def close(self) -> None:
        self.end()
        self._server.socket.close()


class _ChatServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, endpoint: ChatEndpoint) -> None:
        super().__init__(("127.0.0.1", 0), _ChatHandler)
        self.endpoint = endpoint

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer.server_bind looks up the machine's name
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a client that has closed its connection."""


class _ChatHandler(BaseHTTPRequestHandler):
    server: _ChatServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    # Headers and body are two writes. With Nagle's algorithm an answer takes 44 ms more.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self._allowed():
            models = {
                "object": "list",
                "data": [{"id": "rlhf", "object": "model", "created": 0, "owned_by": "rlhf"}],
            }
            self._send(*(200, models) if self.path == "/v1/models" else _unknown(self.path))

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_REQUEST_BYTES:
            self.close_connection = True
            self._drain(int(length) if length.isdecimal() else 0)
            self._send(413, _problem(f"the request needs a Content-Length of at most {MAX_REQUEST_BYTES} bytes"))
            return
        content = self.rfile.read(int(length))
        if not self._allowed():
            return
        if self.path not in STREAMS:
            self._send(*_unknown(self.path))
            return
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = None
        deep = is_deep(body)
        is_retry = self.headers.get(RETRIES, "0") != "0"
        pending = PendingRequest(
            self.path, None if deep else body, too_deep=deep, is_retry=is_retry, connection=self.connection
        )
        answer = self.server.endpoint.ask(pending)
        try:
            self._answer(body, answer)
        except OSError:
            pending.lost = True
            raise

    def _drain(self, left: int) -> None:
        """Read the body, else the client would not read the answer."""
        while left > 0 and (data := self.rfile.read(min(left, 1 << 20))):
            left -= len(data)

    def _answer(self, body: Any, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self._send(400, answer)
        elif body.get("stream"):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            self._send_bytes(200, "text/event-stream", "".join(STREAMS[self.path](answer, with_usage)).encode())
        else:
            self._send(200, answer)

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self.server.endpoint.key.encode()):
            return True
        self._send(401, _problem("the key is not OPENAI_API_KEY"))
        return False

    def _send(self, status: int, value: dict[str, Any]) -> None:
        self._send_bytes(status, "application/json", json.dumps(value).encode())

    def _send_bytes(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the episode's record has all requests, and log lines would fill the terminal."""


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the client has closed its connection. Reads nothing, and does not wait."""
    try:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except OSError:  # for example, the client has reset the connection
        return True


def _unknown(path: str) -> tuple[int, dict[str, Any]]:
    return 404, _problem(f"{path} is not served here. Use {' or '.join(STREAMS)}")


def _problem(why: str) -> dict[str, Any]:
    return {"error": {"message": why, "type": "invalid_request_error", "code": None}}
