"""Serves the few wandb responses that the real client needs to create, resume and fill one run."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created = False
        self.history: list[str] = []
        self.uploads_hang = threading.Event()

    @property
    def steps(self) -> list[int]:
        return [json.loads(line)["_step"] for line in self.history]

    def graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        entity = {"id": "e", "name": "e"}
        bucket = {"id": "b", "name": variables.get("name"), "displayName": "n", "config": "{}", "historyLineCount": 0}
        bucket["project"] = {"id": "p", "name": "p", "entity": entity}
        if operation == "RunResumeStatus":
            bucket |= {"historyLineCount": len(self.history), "historyTail": json.dumps(self.history[-1:]), "tags": []}
            bucket |= {"eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]", "summaryMetrics": "{}"}
            bucket["wandbConfig"] = '{"t": 1}'
            return {"model": {"id": "m", "name": "p", "entity": entity, "bucket": bucket if self.created else None}}
        if operation == "UpsertBucket":
            self.created = True
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        return {"serverInfo": {"features": []}}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            request = json.loads(body)
            answer = {"data": self.server.graphql(request["operationName"], request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            if self.server.uploads_hang.is_set():
                threading.Event().wait(60)
            if chunk := json.loads(body).get("files", {}).get("wandb-history.jsonl"):
                self.server.history[chunk["offset"] : chunk["offset"] + len(chunk["content"])] = chunk["content"]
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
