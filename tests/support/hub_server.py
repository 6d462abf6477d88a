"""Serves the Hub's HTTP protocol, as far as the real client needs it to make repositories, upload and download.

Uploads use git LFS (no xet). The server verifies each object's SHA-256, and that a commit's objects exist.
"""

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.utils import _http

from rlhf.convert.huggingface import hub

TOKEN = "hf_" + "t" * 34
LARGE = 1000
"""Smallest size of LFS objects in bytes; the real Hub uses 10 MB, or a binary suffix."""


@dataclass
class Repository:
    """One model repository: each branch's files (`sha256:...` for LFS objects) and the commits' messages."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        """Name of the newest commit, the same on every branch."""
        return f"{len(self.commits):040x}"


class ErrorAnswer(Exception):
    """An error response with status and message."""

    def __init__(self, status: int, message: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Cut(Exception):
    """Closes the connection without a response."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        """Method and path of every request."""
        self.received: list[str] = []
        """SHA-256 of each uploaded object, once per upload."""
        self.batches: list[int] = []
        """Number of objects in each upload request."""
        self.before: Callable[[int, str], None] = lambda number, request: None
        """Called before each request with its number (from 1) and text; an exception is the response."""
        self.after: Callable[[str], None] = lambda request: None
        """Called after each request; an exception replaces the response."""
        self.lock = threading.Lock()

    def fail(self, pattern: str, error: Exception, times: int = 1) -> None:
        """Answer the next `times` requests that match `pattern` with `error`."""
        fail = _failing(pattern, error, times)
        self.before = lambda number, request: fail(request)

    def lose_answer(self, pattern: str) -> None:
        """Execute the next request that matches `pattern`, and cut the connection instead of answering."""
        self.after = _failing(pattern, Cut(), 1)

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a branch with their content."""
        return {name: self.content(raw) for name, raw in self.repositories[repo_id].branches[revision].items()}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def content(self, raw: bytes) -> bytes:
        return self.objects[raw.decode().removeprefix("sha256:")] if raw.startswith(b"sha256:") else raw


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # a response is one packet
    head = ""
    """Commit of the file in the response."""

    def do(self) -> None:
        request = f"{self.command} {self.path}"
        with self.server.lock:
            self.server.requests.append(request)
            number = len(self.server.requests)
        try:
            self.server.before(number, request)
            body = self.read()
            with self.server.lock:
                answer = self.answer(urlsplit(self.path).path, body)
            self.server.after(request)
        except Cut:
            self.close_connection = True
            return
        except ErrorAnswer as failure:
            headers = {"X-Error-Message": failure.message, "X-Error-Code": failure.code}
            self.close_connection = True  # the request's body may be unread
            self.send(failure.status, json.dumps({"error": failure.message}).encode(), headers)
            return
        if isinstance(answer, bytes):
            headers = {"ETag": f'"{hashlib.sha256(answer).hexdigest()}"', "X-Repo-Commit": self.head}
            self.send(200, answer, headers)
        else:
            self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    do_GET = do_POST = do_PUT = do_HEAD = do

    def read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            length = int(self.headers.get("Content-Length", 0))
            if len(body := self.rfile.read(length)) < length:  # the client disconnected
                raise Cut
            return body
        body = b""
        while size := int(self.rfile.readline() or self.cut(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def cut(self) -> bytes:
        raise Cut

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer(self, path: str, body: bytes) -> Any:
        for pattern, action in ROUTES.items():
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                if action is not Handler.put:  # its URL is signed
                    self.check_token()
                return action(self, *map(unquote, match.groups()), body)
        raise ErrorAnswer(404, f"{self.command} {path}")

    def check_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise ErrorAnswer(401, "Invalid username or password.")

    def repository(self, repo_id: str) -> Repository:
        if repo_id not in self.server.repositories:
            raise ErrorAnswer(404, "Repository not found", "RepoNotFound")
        return self.server.repositories[repo_id]

    def branch(self, repo_id: str, revision: str) -> dict[str, bytes]:
        branches = self.repository(repo_id).branches
        revision = "main" if re.fullmatch("[0-9a-f]{40}", revision) else revision
        if revision not in branches:
            raise ErrorAnswer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return branches[revision]

    def create(self, body: bytes) -> Any:
        asked = json.loads(body)
        repo_id = f"{asked['organization'] or 'somebody'}/{asked['name']}"
        if repo_id.startswith("others/"):
            raise ErrorAnswer(403, "You don't have the rights to create a model under the namespace others")
        url = {"url": f"{self.server.url}/{repo_id}", "name": repo_id}
        if repo_id in self.server.repositories:
            self.close_connection = True
            self.send(409, json.dumps(url | {"error": "You already created this model repo"}).encode(), {})
            raise Cut
        self.server.repositories[repo_id] = Repository(asked.get("visibility") == "private")
        return url

    def info(self, repo_id: str, body: bytes) -> Any:
        there = self.repository(repo_id)
        files = [{"rfilename": name} for name in there.branches["main"]]
        card = there.branches["main"].get("README.md", b"").decode().split("---\n")
        data = yaml.safe_load(card[1]) if len(card) > 2 else None
        about = {"id": repo_id, "private": there.private, "sha": there.head, "tags": [], "cardData": data}
        return about | {"siblings": files}

    def make_branch(self, repo_id: str, name: str, body: bytes) -> Any:
        there = self.repository(repo_id)
        if name in there.branches:
            raise ErrorAnswer(409, "Reference already exists")
        there.branches[name] = dict(there.branches["main"])
        return {}

    def tree(self, repo_id: str, revision: str, body: bytes) -> Any:
        files = self.branch(repo_id, revision)
        return [{"type": "file", "path": name, "size": 1, "oid": _git_oid(raw)} for name, raw in files.items()]

    def preupload(self, repo_id: str, revision: str, body: bytes) -> Any:
        files, answers = self.branch(repo_id, revision), []
        for asked in json.loads(body)["files"]:
            large = asked["size"] >= LARGE and asked["path"] != "README.md"
            there = files.get(asked["path"])
            oid = None if there is None else there.decode()[7:] if there.startswith(b"sha256:") else _git_oid(there)
            mode = "lfs" if large else "regular"
            answers.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def batch(self, repo_id: str, body: bytes) -> Any:
        answers, objects = [], json.loads(body)["objects"]
        self.server.batches.append(len(objects))
        for asked in objects:
            actions = {"upload": {"href": f"{self.server.url}/lfs/{asked['oid']}?signature=s3cret"}}
            answers.append(asked | ({} if asked["oid"] in self.server.objects else {"actions": actions}))
        return {"transfer": "basic", "objects": answers}

    def put(self, oid: str, body: bytes) -> Any:
        if "signature=s3cret" not in self.path:
            raise ErrorAnswer(403, "SignatureDoesNotMatch")
        if hashlib.sha256(body).hexdigest() != oid:
            raise ErrorAnswer(400, "The bytes are not those of the object")
        self.server.objects[oid] = body
        self.server.received.append(oid)
        return {}

    def commit(self, repo_id: str, revision: str, body: bytes) -> Any:
        files, message = dict(self.branch(repo_id, revision)), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, self.repository(repo_id).head):
                    raise ErrorAnswer(412, "A commit has happened since. Please refresh and try again.")
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if len(self.server.objects.get(value["oid"], b"")) != value["size"]:
                    raise ErrorAnswer(400, f"LFS object {value['oid']} of {value['path']} is not there")
                files[value["path"]] = f"sha256:{value['oid']}".encode()
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        there = self.repository(repo_id)
        there.branches[revision] = files
        there.commits.append(message)
        url = f"{self.server.url}/{repo_id}/commit/{there.head}"
        return {"commitUrl": url, "commitOid": there.head, "hookOutput": ""}

    def check_card(self, body: bytes) -> Any:
        content = json.loads(body)["content"]
        if not re.match(r"---\n.*\n---\n", content, re.DOTALL):
            raise ErrorAnswer(400, "Invalid metadata in README.md")
        return {"errors": [], "warnings": []}

    def resolve(self, repo_id: str, revision: str, name: str, body: bytes) -> Any:
        files = self.branch(repo_id, revision)
        if name not in files:
            raise ErrorAnswer(404, "Entry not found", "EntryNotFound")
        self.head = self.repository(repo_id).head
        return self.server.content(files[name])

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


REPOSITORY = r"([\w.-]+/[\w.-]+)"
ROUTES: dict[str, Callable[..., Any]] = {
    r"POST /api/repos/create": Handler.create,
    r"POST /api/validate-yaml": Handler.check_card,
    rf"GET /api/models/{REPOSITORY}(?:/revision/[^/]+)?": Handler.info,
    rf"POST /api/models/{REPOSITORY}/branch/(.+)": Handler.make_branch,
    rf"GET /api/models/{REPOSITORY}/tree/([^/]+)": Handler.tree,
    rf"POST /api/models/{REPOSITORY}/preupload/(.+)": Handler.preupload,
    rf"POST /api/models/{REPOSITORY}/commit/(.+)": Handler.commit,
    rf"POST /{REPOSITORY}\.git/info/lfs/objects/batch": Handler.batch,
    r"PUT /lfs/([0-9a-f]{64})": Handler.put,
    rf"(?:GET|HEAD) /{REPOSITORY}/resolve/([^/]+)/(.+)": Handler.resolve,
}


def _failing(pattern: str, error: Exception, times: int) -> Callable[[str], None]:
    left = [error] * times

    def fail(request: str) -> None:
        if left and re.search(pattern, request):
            raise left.pop()

    return fail


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve() -> Iterator[Server]:
    """Serve a Hub without repositories, with one user `TOKEN`."""
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def hub_of_mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve a Hub as this process' Hub, with its user's token `TOKEN` and short waits."""
    with serve() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # A real upload uses xet if hf_xet is installed, but there is no xet server for tests.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "WAITS_S", (0.0, 0.0))
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
        yield server
        huggingface_hub.close_session()
