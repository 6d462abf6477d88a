"""Uploads by the Hub's real client to a server on this machine that speaks its protocol."""

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rlhf.convert.huggingface import hub
from rlhf.convert.huggingface.hub import prepare_repository, upload_folder
from rlhf.errors import UserError
from tests.support.hub_server import ROUTES, TOKEN, Cut, ErrorAnswer, Handler, Server, hub_of_mine

CARD = "---\nlibrary_name: transformers\n---\n# Card\n"
REPOSITORY = "somebody/model"


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    with hub_of_mine(monkeypatch) as server:
        yield server


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder that looks like a model with three weight files."""
    folder = tmp_path / "merged"
    (folder / "sub").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "not sent").write_text("x")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "empty.txt").write_text("")
    (folder / "sub" / "chat_template.jinja").write_text("{{ messages }}")
    for number in (1, 2, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").write_bytes(os.urandom(5000))
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def local(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in hub.files_to_send(folder).items()}


def test_an_upload_shows_all_files_by_one_commit(server, folder):
    url = upload_folder(folder, REPOSITORY, private=True, message="First", card=CARD)
    assert url.startswith(f"{server.url}/{REPOSITORY}/commit/")
    assert server.files(REPOSITORY) == local(folder) | {"README.md": CARD.encode()}
    assert "sub/chat_template.jinja" in server.files(REPOSITORY)
    assert server.repositories[REPOSITORY].private
    assert server.repositories[REPOSITORY].commits == ["First"]
    assert len(server.received) == 3


def test_a_card_in_the_folder_overrides_the_generated_card(server, folder):
    (folder / "README.md").write_text(CARD + "mine\n")
    upload_folder(folder, REPOSITORY, card=CARD)
    assert server.files(REPOSITORY)["README.md"] == (CARD + "mine\n").encode()


def test_a_second_upload_sends_nothing_and_makes_no_commit(server, folder):
    for _ in range(2):
        upload_folder(folder, REPOSITORY)
    assert len(server.received) == 3
    assert server.repositories[REPOSITORY].commits == ["Upload merged"]


def test_a_smaller_model_takes_the_place_of_a_larger_one(server, folder):
    upload_folder(folder, REPOSITORY)
    server.repositories[REPOSITORY].branches["main"] |= {"notes.md": b"kept", "data/model.safetensors": b"kept"}
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "model.safetensors").write_bytes(os.urandom(3000))
    upload_folder(folder, REPOSITORY)
    kept = {"notes.md": b"kept", "data/model.safetensors": b"kept"}
    assert server.files(REPOSITORY) == local(folder) | kept


def test_a_revision_is_a_branch_that_is_made(server, folder):
    for _ in range(2):
        upload_folder(folder, REPOSITORY, revision="step/80")
    assert server.files(REPOSITORY, "step/80") == local(folder)
    assert server.files(REPOSITORY) == {}


@pytest.mark.parametrize("what", ["create", "preupload", "batch", "PUT ", "tree", "/commit/"])
@pytest.mark.parametrize("error", [ErrorAnswer(500, "Internal Error"), Cut()], ids=["500", "cut"])
def test_transient_errors_of_the_hub_are_retried(server, folder, what, error):
    server.fail(what, error)
    upload_folder(folder, REPOSITORY)
    assert server.files(REPOSITORY) == local(folder)
    assert len(server.received) == 3


def test_a_commit_whose_answer_is_lost_is_not_made_twice(server, folder):
    server.lose_answer("/commit/")
    upload_folder(folder, REPOSITORY)
    assert sum("/commit/" in request for request in server.requests) == 1
    assert len(server.repositories[REPOSITORY].commits) == 1


def test_an_upload_that_ended_early_is_continued(server, folder, monkeypatch):
    """The Hub keeps each uploaded group of weights before the next begins, so a repeated upload sends only the rest."""
    monkeypatch.setattr(hub, "FILES_AT_A_TIME", 1)
    last = hashlib.sha256((folder / "model-00003-of-00003.safetensors").read_bytes()).hexdigest()
    server.fail(last, Cut(), times=1000)
    with pytest.raises(UserError, match="Run the same command again") as caught:
        upload_folder(folder, REPOSITORY)
    assert "\n" not in str(caught.value)
    assert server.files(REPOSITORY) == {}
    assert len(server.received) == 2
    assert server.batches[:3] == [1, 1, 1]
    server.fail("nothing", Cut())
    upload_folder(folder, REPOSITORY)
    assert len(server.received) == 3
    assert server.files(REPOSITORY) == local(folder)


def upload_error(server: Server, *arguments, **settings) -> str:
    with pytest.raises(UserError) as caught:
        prepare_repository(*arguments, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert TOKEN not in text
    return text


def test_mistakes_are_told_before_anything_is_sent(server, monkeypatch):
    assert "Give the repository as NAMESPACE/NAME" in upload_error(server, "a/b/c")
    text = upload_error(server, "others/model")
    assert "answered 403 (You don't have the rights to create a model under the namespace others)" in text
    assert "a token that may write there" in text
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "answered 401" in (text := upload_error(server, REPOSITORY))
    assert "hf auth login" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "Unset HF_HUB_OFFLINE" in upload_error(server, REPOSITORY)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    assert "no token for the Hub" in upload_error(server, REPOSITORY)
    assert server.repositories == {}


def test_private_is_never_public(server, folder):
    prepare_repository(REPOSITORY)
    assert "is public on the Hub" in upload_error(server, REPOSITORY, private=True)
    with pytest.raises(UserError, match="is public on the Hub; nothing was sent"):
        upload_folder(folder, REPOSITORY, private=True)
    assert server.received == []


@pytest.mark.parametrize("status", [400, 500])
def test_a_token_in_an_error_of_the_hub_is_redacted(server, status, caplog):
    server.fail("create", ErrorAnswer(status, f"No user has {TOKEN}"), times=10)
    assert "(the token)" in upload_error(server, REPOSITORY)
    assert TOKEN not in caplog.text
    assert ("Next try" in caplog.text) == (status == 500)


def test_a_signature_in_an_upload_url_is_redacted(server, folder, caplog):
    logging.getLogger("huggingface_hub").addHandler(caplog.handler)
    server.fail("PUT ", ErrorAnswer(403, "Expired"), times=10)
    with pytest.raises(UserError, match=r"answered 403 \(Expired\)") as caught:
        upload_folder(folder, REPOSITORY)
    server.fail("PUT ", ErrorAnswer(500, "Busy"), times=100)
    with pytest.raises(UserError, match=r"answered 500 \(Busy\)"):
        upload_folder(folder, REPOSITORY)
    logging.getLogger("huggingface_hub").removeHandler(caplog.handler)
    assert "s3cret" not in str(caught.value) + caplog.text


def test_an_unreachable_hub_is_an_error_with_a_remedy(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "Run the same command again" in upload_error(server, REPOSITORY)


def test_a_hub_that_does_not_answer_times_out(server, monkeypatch):
    monkeypatch.setattr(hub, "SILENCE_S", 0.2)
    over = threading.Event()
    server.before = lambda number, request: over.wait(120) and None
    try:
        assert "timed out" in upload_error(server, REPOSITORY)
    finally:
        over.set()


def test_links_out_of_the_folder_and_pipes_are_not_uploaded(server, folder, tmp_path):
    (tmp_path / "key").write_text("private")
    (folder / "notes.txt").symlink_to(tmp_path / "key")
    with pytest.raises(UserError, match="leads out of the folder"):
        upload_folder(folder, REPOSITORY)
    (folder / "notes.txt").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match="is not a regular file"):
        upload_folder(folder, REPOSITORY)
    (folder / "pipe").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="is not a Hugging Face folder"):
        upload_folder(folder, REPOSITORY)
    assert server.requests == []


def test_of_two_uploads_at_once_one_model_is_there(server, folder):
    """Another upload commits its model between this upload's check of existing files and this upload's commit."""
    other = {"model.safetensors": b"theirs", "config.json": b"theirs"}

    def come_between(number: int, request: str) -> None:
        if "/commit/" in request:
            server.before = lambda number, request: None
            server.repositories[REPOSITORY].branches["main"] |= other
            server.repositories[REPOSITORY].commits.append("Theirs")

    server.before = come_between
    upload_folder(folder, REPOSITORY)
    assert server.files(REPOSITORY) == local(folder)
    assert server.repositories[REPOSITORY].commits == ["Theirs", "Upload merged"]


ASKED = (Handler.create, Handler.preupload, Handler.batch, Handler.tree, Handler.commit)
ODD: tuple[Any, ...] = (None, {"a": 1}, "", "<html>Log in</html>", 7, [1])


@pytest.mark.parametrize("answer", ODD, ids=str)
@pytest.mark.parametrize("route", ASKED)
def test_a_hub_answer_of_unknown_form_is_an_error(server, folder, monkeypatch, route, answer):
    """Answers as from a proxy, or from the login page of a network."""
    odd = answer.encode() if isinstance(answer, str) else answer
    monkeypatch.setitem(ROUTES, next(key for key, value in ROUTES.items() if value is route), lambda *_: odd)
    with pytest.raises(UserError, match=f"{REPOSITORY}: .*HF_ENDPOINT|formatted|Malformed") as caught:
        upload_folder(folder, REPOSITORY)
    assert len(str(caught.value).splitlines()) == 1
    assert not server.repositories or server.files(REPOSITORY) == {}
