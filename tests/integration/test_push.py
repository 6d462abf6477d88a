"""Verb `push`: a checkpoint arrives on the Hub as a model that transformers opens, with a card that describes the
run. The Hub is a server on this machine that speaks its protocol; the client is the real one."""

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants, snapshot_download
from transformers import AutoModelForCausalLM

import rlhf
from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.config import Config
from rlhf.convert.huggingface import hub
from rlhf.convert.huggingface.model_card import ModelCard
from rlhf.convert.verbs import pushing
from rlhf.storage.layout import DRIVER_STATE, step_dir
from rlhf.storage.reading import CheckedFiles
from tests.support.checkpoints import flip_bit, make_backend, make_checkpointer, make_config, world_of_one
from tests.support.hostile import manifest, with_hash
from tests.support.hub_server import TOKEN, Repository, Server, hub_of_mine
from tests.support.preload import forkserver

REPOSITORY = "somebody/model"
SECRET = "open-sesame"


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    with hub_of_mine(monkeypatch) as server:
        yield server


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    """The configuration of a run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    config = make_config(folder)
    config.checkpoint.contents = ["model", "hf_model"]
    config.model.path = "org/base"
    config.data.train_files = ["org/prompts:main@train", "/home/me/secret_project/extra.jsonl"]
    config.rollout.engine_kwargs.vllm = {"api_key": SECRET, "kv_cache_dtype": "fp8"}
    config.actor.optim.lr = 3e-7
    with world_of_one(folder):
        for step in (2, 4):
            backend = make_backend(seed=1, train_steps=step)
            make_checkpointer(config, backend, step).save(step, {"val/accuracy": step / 8, "loss": float("nan")})
    return config


@pytest.fixture
def command(capsys):
    def run(*arguments) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert TOKEN not in out + err
        return code, out, err

    return run


def base_on(server: Server) -> None:
    """Put the base model with its license on the server."""
    server.repositories["org/base"] = Repository(False, {"main": {"README.md": b"---\nlicense: apache-2.0\n---\n"}})


def test_a_run_arrives_as_a_model(config, server, command, tmp_path, monkeypatch):
    base_on(server)
    code, out, err = command("push", config.run_dir, REPOSITORY, "--private", "--max-shard-size", "20KB", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"repo_id": REPOSITORY, "commit_url": f"{server.url}/{REPOSITORY}/commit/{1:040x}"}
    assert server.repositories[REPOSITORY].private
    assert server.repositories[REPOSITORY].commits == ["Step 4"]
    assert len([name for name in server.files(REPOSITORY) if name.endswith(".safetensors")]) > 1
    folder = snapshot_download(REPOSITORY, cache_dir=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with world_of_one(tmp_path):
        trained = dict(make_backend(seed=1, train_steps=4).full_tensors())
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())


def test_the_card_says_how_it_came_to_be(config, server, command):
    base_on(server)
    assert command("push", step_dir(config.run_dir, 2), REPOSITORY, "--revision", "early")[0] == 0
    assert "README.md" not in server.files(REPOSITORY)
    card = server.files(REPOSITORY, "early")["README.md"].decode()
    _, metadata, text = card.split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "datasets": ["org/prompts"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["rlhf", "reinforcement-learning", "grpo"],
    }
    for part in (
        "| step | 2 of 10 |",
        "| val/accuracy | 0.25 |",
        "| actor.optim.lr | 3e-07 |",
        "python -m rlhf.train \\\n  recipes=null",
        "model.path=org/base",
        "extra.jsonl",
        "kv_cache_dtype",
        "torch 2.",
    ):
        assert part in text, part
    for absent in (SECRET, "secret_project", "/home/me", str(config.run_dir), "| loss |", os.uname().nodename, TOKEN):
        assert absent not in card, absent


def test_a_base_that_the_hub_does_not_know_is_not_linked(config, server, command):
    command("push", config.run_dir, REPOSITORY)
    metadata = yaml.safe_load(server.files(REPOSITORY)["README.md"].decode().split("---\n")[1])
    assert not {"base_model", "license", "base_model_relation"} & metadata.keys()


def test_a_base_in_a_folder_is_named_only(config, server, command, tmp_path):
    path = shutil.copytree(step_dir(config.run_dir, 4), tmp_path / "global_step_4")
    text = (path / "config.yaml").read_text().replace("path: org/base", "path: /home/me/base")
    with_hash("config.yaml", text.encode())(path)
    assert command("push", path, REPOSITORY)[0] == 0
    card = server.files(REPOSITORY)["README.md"].decode()
    assert "reinforcement learning from base, by" in card
    assert "base_model" not in card
    assert "/home" not in card
    assert not any("models/home" in request or "base" in request for request in server.requests)


def test_a_folder_is_sent_as_it_is(config, server, command, tmp_path):
    assert command("export", config.run_dir, tmp_path / "out")[0] == 0
    code, _, err = command("push", tmp_path / "out", REPOSITORY, "--dtype", "bfloat16")
    assert (code, "is uploaded unchanged" in err, server.requests) == (2, True, [])
    assert command("push", tmp_path / "out", REPOSITORY, "--commit-message", "Mine")[0] == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {name: raw for name, raw in server.files(REPOSITORY).items() if name != "README.md"} == files
    assert server.repositories[REPOSITORY].commits == ["Mine"]


def test_merge_uploads_too(config, server, command, tmp_path):
    arguments = ("--local_dir", config.run_dir, "--target_dir", tmp_path / "out", "--hf_upload_path", REPOSITORY)
    assert command("merge", *arguments, "--private")[0] == 0
    assert server.repositories[REPOSITORY].private
    assert "config.json" in server.files(REPOSITORY)
    assert b"recipes=null" in server.files(REPOSITORY)["README.md"]


def test_a_kill_in_the_middle_is_continued(config, server, command, tmp_path, monkeypatch):
    """A push is killed while it sends weights. The next push sends the rest, and removes the killed push's files."""
    child = forkserver.Process(target=_push_slowly, args=(config.run_dir, server.url, tmp_path))
    server.before = lambda number, request: child.kill() if len(server.received) == 1 else None
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert server.repositories[REPOSITORY].commits == []
    assert any(path.name.startswith("rlhf.") for path in tmp_path.iterdir())
    first = list(server.received)
    server.before = lambda number, request: None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert command("push", config.run_dir, REPOSITORY, "--max-shard-size", "20KB")[0] == 0
    assert len(server.received) == len(set(server.received)) > len(first) == 1
    assert len(server.repositories[REPOSITORY].commits) == 1
    assert not any(path.name.startswith("rlhf.") for path in tmp_path.iterdir())


def _push_slowly(run_dir: Path, url: str, scratch: Path) -> None:
    """Push one weight file at a time, in this process, which the test kills."""
    tempfile.tempdir = str(scratch)
    os.environ |= {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN}
    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET, hub.FILES_AT_A_TIME = url, True, 1
    main(["push", str(run_dir), REPOSITORY, "--max-shard-size", "20KB"])


def test_the_pages_commands(config, server, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(rlhf.__file__).parents[1] / "docs/interop.md").read_text()
    commands = re.findall(r"^python -m rlhf\.checkpoint (push .+)$", page, re.MULTILINE)
    assert len(commands) >= 3
    (tmp_path / "checkpoints/rlhf").mkdir(parents=True)
    shutil.copytree(config.run_dir, "checkpoints/rlhf/offline")
    # The run on the page is longer: give this run a step 80.
    harmed = shutil.copytree(step_dir(config.run_dir, 4), "checkpoints/rlhf/offline/global_step_80")
    manifest(lambda payload: payload | {"step": 80})(Path(harmed))
    driver = json.loads((Path(harmed) / DRIVER_STATE).read_text())
    with_hash(DRIVER_STATE, json.dumps(driver | {"step": 80}).encode())(Path(harmed))
    assert command("export", "checkpoints/rlhf/offline/global_step_4", "my_model")[0] == 0
    for text in commands:
        assert command(*shlex.split(text))[0] == 0
    arrived = server.repositories["my-name/my-model"]
    assert arrived.private
    assert arrived.commits[0] == "Step 80"
    assert arrived.commits[-1] == "The folder as it is"
    assert set(arrived.branches) == {"main", "step-80"}
    half, whole = (len(server.files("my-name/my-model", b)["model.safetensors"]) for b in ("step-80", "main"))
    assert half < 0.7 * whole


def test_mistakes_and_damage_are_one_line(config, server, command, tmp_path, monkeypatch):
    link = tmp_path / "linked/config.json"
    link.parent.mkdir()
    link.symlink_to("/etc/hostname")
    for path, repository, message in (
        (tmp_path / "nothing", REPOSITORY, "does not exist"),
        (tmp_path, REPOSITORY, "has no checkpoint"),
        (link.parent, REPOSITORY, "leads out of the folder"),
        (config.run_dir, "a/b/c", "NAMESPACE/NAME"),
        (config.run_dir, "others/model", "answered 403"),
    ):
        code, out, err = command("push", path, repository)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert message in err
    assert server.repositories == {}
    harmed = tmp_path / "global_step_4"
    shutil.copytree(step_dir(config.run_dir, 4), harmed)
    flip_bit(next((harmed / "actor/model").glob("rank_*")), 9999)
    code, out, err = command("push", harmed, REPOSITORY)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "content differs from its hash" in err
    assert server.files(REPOSITORY) == {}
    (harmed / "manifest.json").write_text("{")
    requests = len(server.requests)
    code, out, err = command("push", harmed, REPOSITORY)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert len(server.requests) == requests


def test_a_full_disk_is_one_line(config, server, command, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/rlhf.x/model")

    monkeypatch.setattr(pushing, "to_hf_folder", full)
    code, out, err = command("push", config.run_dir, REPOSITORY)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "Set TMPDIR" in err
    assert server.received == []


def test_without_a_token(config, server, command, monkeypatch):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.delenv("HF_TOKEN")
    assert "no token for the Hub" in command("push", config.run_dir, REPOSITORY)[2]


HOSTILE = {
    "an alias bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9))
    + "reward: {functions: *j}\n",
    "no YAML": "a: [",
    "deep": "[" * 1500,
    "a list": "[1]",
    "binary": "\x00\x01",
    "mischief": yaml.safe_dump(
        {
            "model": {"path": "x\n---\nlicense: mit"},
            "algorithm": {"adv_estimator": "</td><script>\x1b[2J```"},
            "reward": {"functions": ["```\n# Heading", {"a": [1]}]},
            "actor": {"optim": {"lr": {"deep": "`"}}},
        }
    ),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_configuration_makes_a_harmless_card(config, tmp_path, text):
    path = tmp_path / "global_step_4"
    shutil.copytree(step_dir(config.run_dir, 4), path)
    with_hash("config.yaml", text.encode())(path)
    manifest(lambda payload: payload | {"versions": {"rlhf": "</b>\n| x"}, "backend": "`|`"})(path)
    found = read_manifest(path)
    card = ModelCard(found, CheckedFiles(path, found.files)).text("a/b")
    _, metadata, text = card.split("---\n", 2)
    assert yaml.safe_load(metadata)["library_name"] == "transformers"
    assert "license" not in yaml.safe_load(metadata)
    assert all(character.isprintable() for line in card.split("\n") for character in line)
    prose, *fenced = text.split("```")
    assert len(fenced) in (0, 2)
    assert "<script" not in prose.replace("\\<script", "")
    assert "\n# Heading" not in prose
    assert len(card) < 20_000


def test_a_card_of_an_import(config, tmp_path):
    path = tmp_path / "global_step_4"
    shutil.copytree(step_dir(config.run_dir, 4), path)
    manifest(
        lambda payload: (
            payload
            | {
                "imported": {"layout": "fsdp", "path": "/home/me/verl"},
                "files": {name: entry for name, entry in payload["files"].items() if name != "config.yaml"},
            }
        )
    )(path)
    found = read_manifest(path)
    card = ModelCard(found, CheckedFiles(path, found.files)).text("a/b")
    assert "of another tool (fsdp), not trained further" in card
    assert "/home/me" not in card
    assert "python -m" not in card


def test_every_object_is_what_it_says(config, server, command):
    command("push", config.run_dir, REPOSITORY)
    assert all(hashlib.sha256(raw).hexdigest() == oid for oid, raw in server.objects.items())
    assert Path(next(iter(server.files(REPOSITORY)))).name
