"""Secret of a run: where it comes from, which requests the middleware accepts, and that a run keeps its secret."""

import asyncio
import re
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.rollout.servers.__main__ import server_flags
from rlhf.rollout.servers.secret import VARIABLE, Secret, SecretMiddleware, environment_secret, nonce_hmac, run_secret

RIGHT = "0123456789abcdef-right"


@pytest.fixture(autouse=True)
def unset_secret_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_a_run_has_one_secret_which_only_its_owner_reads(tmp_path):
    file = tmp_path / "rollout_servers" / "secret"
    first = run_secret(file)
    assert re.fullmatch(r"[0-9a-f]{64}", first.value)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["secret"]
    assert run_secret(file) == first
    assert first.source == str(file)
    assert run_secret(tmp_path / "other" / "secret") != first
    assert first.value not in repr(first)


def test_a_partly_written_secret_is_replaced(tmp_path):
    (tmp_path / ".tmp-secret").write_bytes(b"abc")
    assert len(run_secret(tmp_path / "secret").value) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_read_is_no_secret(tmp_path, mode):
    file = tmp_path / "secret"
    run_secret(file)
    file.chmod(mode)
    with pytest.raises(UserError, match=rf"{file} is open to other users.*{VARIABLE}"):
        run_secret(file)


def test_the_environment_variable_overrides_the_secret_file(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, RIGHT)
    assert run_secret(tmp_path / "secret") == Secret(RIGHT, VARIABLE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["short", "with blanks in between", "with-a-line-\n-break", "ünsendable-in-a-header"])
def test_what_cannot_be_a_secret_is_the_users_mistake_and_not_shown(value):
    with pytest.raises(UserError, match=f"{VARIABLE}: a secret has at least 16") as caught:
        environment_secret({VARIABLE: value})
    assert value not in str(caught.value)


def test_an_unset_or_empty_variable_is_no_secret():
    assert environment_secret({}) is None
    assert environment_secret({VARIABLE: ""}) is None


def ask(kind: str, *authorization: str | bytes, path: str = "/health") -> tuple[list[str], list[dict[str, Any]]]:
    """Return the paths that reached the application behind the middleware, and the messages sent back."""
    reached: list[str] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope.get("path", scope["type"]))

    async def receive() -> Any:
        raise AssertionError("the body of a request that is refused is not read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"here")]
    headers += [(b"authorization", a if isinstance(a, bytes) else a.encode()) for a in authorization]
    scope = {"type": kind, "path": path, "headers": headers} if kind != "lifespan" else {"type": kind}
    asyncio.run(SecretMiddleware(app)(scope, receive, send))
    return reached, sent


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setenv(VARIABLE, RIGHT)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/ping", "/docs", "/pause", "/v1/chat/completions", "/none"])
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_every_route_requires_the_secret(served, kind, path):
    assert ask(kind, f"Bearer {RIGHT}", path=path) == ([path], [])
    wrong = [
        (),
        ("",),
        (RIGHT,),
        ("Bearer ",),
        (f"Bearer {RIGHT[:-1]}",),
        (f"Bearer {RIGHT}x",),
        (f"bearer {RIGHT}",),
        (b"Bearer \xff\xfe",),
        (f"Bearer {RIGHT}", "Bearer other"),  # a proxy may check one header, and the application the other
    ]
    for authorization in wrong:
        reached, sent = ask(kind, *authorization, path=path)
        assert not reached
        if kind == "http":
            assert (sent[0]["type"], sent[0]["status"]) == ("http.response.start", 401)
            assert sent[1]["type"] == "http.response.body"
        else:
            assert sent == [{"type": "websocket.close", "code": 1008}]
        assert RIGHT not in str(sent)


def test_lifespan_events_need_no_secret(served):
    assert ask("lifespan") == (["lifespan"], [])


def test_without_a_secret_the_middleware_lets_nothing_start():
    with pytest.raises(AssertionError, match=VARIABLE):
        SecretMiddleware(lambda *_: None)


def test_the_servers_last_flag_is_the_middleware_where_there_is_a_secret():
    theirs = ["model", "--middleware", "their.own"]
    words = server_flags(theirs, cpu=True, has_secret=True)
    assert words[-2:] == ["--middleware", "rlhf.rollout.servers.secret.SecretMiddleware"]
    assert "rlhf.rollout.servers.secret.SecretMiddleware" not in server_flags(theirs, cpu=True, has_secret=False)


def test_a_proof_is_of_its_secret_nonce_and_path():
    proofs = {nonce_hmac(*of) for of in (("s", "n", "/p"), ("t", "n", "/p"), ("s", "m", "/p"), ("s", "n", "/q"))}
    assert len(proofs) == 4
