"""Folders that are no checkpoints, or such as nobody's trainer has written: each is one message and an exit code, for
people who look, and passed over for the intact one before by a run that resumes."""

import json
import os
import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.commit import manifest as manifest_module
from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.manifest import describe
from rlhf.checkpoint.commit.retention import retire
from rlhf.checkpoint.load.proofs import newest_usable
from rlhf.checkpoint.run_file import read_run_file
from rlhf.checkpoint.start.run_dir import driver_state_of, newest_run_id
from rlhf.config.checkpoint import CheckpointConfig
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import LoneTransport
from rlhf.storage.files import write_file
from rlhf.storage.layout import CONFIG, DRIVER_STATE, MANIFEST, POINTER, RESOLVED, RUN_FILE, step_dir
from tests.support.checkpoints import PlainRole, make_config, make_driver, resume, save_steps
from tests.support.published import steps

VERBS = ("list", "inspect", "verify")
PATIENCE_S = 20


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """What waits for a pipe is ended by a failure."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"nothing for {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run directory with intact checkpoints of steps 2 and 4."""
    config = make_config(tmp_path_factory.mktemp("saved"))
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    save_steps(config, PlainRole(), 2, 4)
    return config.run_dir


@pytest.fixture
def run_dir(saved, tmp_path) -> Path:
    return shutil.copytree(saved, make_config(tmp_path).run_dir)


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A manifest with a valid checksum, with other fields."""

    def harm(checkpoint: Path) -> None:
        payload = json.loads((checkpoint / MANIFEST).read_text())["payload"]
        changed = change(payload)
        (checkpoint / MANIFEST).write_bytes(manifest_module._text(payload if changed is None else changed))

    return harm


def field(name: str, value: object) -> Callable[[Path], None]:
    return manifest(lambda payload: payload | {name: value})


def entry(name: str, value: object) -> Callable[[Path], None]:
    """A manifest with one file more, or another entry of one."""
    return manifest(lambda payload: payload | {"files": payload["files"] | {name: value}})


def content(raw: bytes | str) -> Callable[[Path], None]:
    """Other bytes in the place of the manifest's."""
    return lambda checkpoint: (checkpoint / MANIFEST).write_bytes(raw if isinstance(raw, bytes) else raw.encode())


def instead(make: Callable[[Path], object], name: str = MANIFEST) -> Callable[[Path], None]:
    """Something else in the place of a file."""

    def harm(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        make(checkpoint / name)

    return harm


def proven(name: str, raw: bytes) -> Callable[[Path], None]:
    """Other bytes of a file, for which the manifest has the hash."""

    def harm(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        written = describe([write_file(checkpoint, name, [raw])])
        manifest(lambda payload: payload | {"files": payload["files"] | written})(checkpoint)

    return harm


def bind(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def weights(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(16)


WEIGHTS = "actor/huggingface/model.safetensors"
HASH = "0" * 32
DRIVER = make_driver().state_dict()

NO_MANIFEST: dict[str, Callable[[Path], None]] = {
    "a pipe": instead(os.mkfifo),
    "a socket": instead(bind),
    "a folder": instead(Path.mkdir),
    "a dangling link": instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "a link to a device": instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to a folder": instead(lambda path: path.symlink_to("/")),
    "nothing": instead(lambda path: None),
    "no bytes": content(b""),
    "a terabyte of nothing": instead(sparse),
    "binary": content(bytes(range(256)) * 40),
    "no JSON": content("checkpoint: yes"),
    "deep JSON": content("[" * 200_000),
    "deep objects": content('{"payload":' * 50_000 + "1" + "}" * 50_000),
    "a huge number": content('{"payload": {"step": ' + "9" * 100_000 + "}}"),
    "infinity": content('{"payload": {"step": 1e999}, "checksum": "0"}'),
    "a list": content("[1, 2]"),
    "a number": content("7"),
    "a text": content('"payload"'),
    "null": content("null"),
    "a manifest of the web": content('{"name": "site", "icons": [], "start_url": "."}'),
    "a payload that is none": content('{"payload": [1], "checksum": "0"}'),
    "no checksum": content('{"payload": {"step": 4}}'),
    "duplicated keys": lambda checkpoint: content(
        (checkpoint / MANIFEST).read_text().replace('"step": 4', '"step": 9,\n  "step": 4')
    )(checkpoint),
    "UTF-16": lambda checkpoint: content((checkpoint / MANIFEST).read_text().encode("utf-16"))(checkpoint),
    "half of it": lambda checkpoint: os.truncate(checkpoint / MANIFEST, 2000),
}
WRONG_FIELDS: dict[str, Callable[[Path], None]] = {
    "another step": field("step", 5),
    "a negative step": field("step", -4),
    "a step in words": field("step", "4"),
    "a true step": field("step", True),
    "a step that is no number": field("step", float("nan")),
    "no step": manifest(lambda payload: {key: value for key, value in payload.items() if key != "step"}),
    "one field more": field("pickle", "gASV"),
    "another format": field("format", 99),
    "a format that is a list": field("format", [[[3]]] * 1000),
    "contents that are a text": field("contents", "model"),
    "contents of numbers": field("contents", [1, 2]),
    "versions that are a list": field("versions", ["torch"]),
    "metrics in words": field("metrics", {"val/accuracy": "good"}),
    "a date that is a number": field("created", 2026),
    "files that are a list": field("files", ["manifest.json"]),
    "a file outside": entry("../../../etc/passwd", {"size": 1, "xxh3_128": HASH}),
    "an absolute file": entry("/etc/passwd", {"size": 1, "xxh3_128": HASH}),
    "a file without a name": entry("", {"size": 0, "xxh3_128": ""}),
    "a file with a zero byte": entry("a\0b", {"size": 0, "xxh3_128": ""}),
    "half a character": entry("\ud800", {"size": 0, "xxh3_128": ""}),
    "a name too long": entry("x" * 5000, {"size": 0, "xxh3_128": ""}),
    "the manifest itself": entry(MANIFEST, {"size": 0, "xxh3_128": ""}),
    "an entry that is a number": entry("x", 5),
    "an entry of nothing": entry("x", {}),
    "a negative size": entry(CONFIG, {"size": -1, "xxh3_128": ""}),
    "a size beyond all disks": entry("x", {"size": 10**30, "xxh3_128": HASH}),
    "a size in words": entry(CONFIG, {"size": "many", "xxh3_128": HASH}),
    "a hash that is a number": entry(CONFIG, {"size": 1, "xxh3_128": 7}),
    "too few hashes": entry("x", {"size": 1 << 40, "xxh3_128": HASH}),
    "domains that are a text": entry(CONFIG, {"size": 1, "xxh3_128": HASH, "domains": "all"}),
}
WRONG_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe for a file": instead(os.mkfifo, CONFIG),
    "a socket for a file": instead(bind, DRIVER_STATE),
    "a folder for a file": instead(Path.mkdir, WEIGHTS),
    "a link to another file": instead(lambda path: path.symlink_to("/etc/hostname"), CONFIG),
    "a link in a circle": instead(lambda path: path.symlink_to(path.name), DRIVER_STATE),
    "a file within a file": entry(f"{CONFIG}/x", {"size": 1, "xxh3_128": HASH}),
    "escapes of a terminal": entry("\x1b[2J\x07", {"size": 1, "xxh3_128": HASH}),
    "a torn file": lambda checkpoint: os.truncate(checkpoint / WEIGHTS, 9),
}
WRONG_DOCUMENTS: dict[str, Callable[[Path], None]] = {
    "a driver state that is a list": proven(DRIVER_STATE, b"[1]"),
    "a driver state of nothing": proven(DRIVER_STATE, b"{}"),
    "a driver state in words": proven(DRIVER_STATE, json.dumps(DRIVER | {"step": "four"}).encode()),
    "a deep driver state": proven(DRIVER_STATE, b"[" * 100_000),
    "an index that is a list": proven("actor/model/index.safetensors", weights(b"[]")),
    "an index of numbers": proven("actor/model/index.safetensors", weights(b'{"__metadata__": 5}')),
    "an index without shards": proven("actor/model/index.safetensors", weights(b'{"__metadata__": {"tensors": "{}"}}')),
}
LYING_WEIGHTS: dict[str, bytes] = {
    "nothing": b"",
    "no tensors": weights(b"{}"),
    "a length of 2^64": weights(b"{}", 2**64 - 1),
    "a length beyond the end": weights(b"{}", 10**6),
    "no JSON": weights(b"pickle!!"),
    "a list": weights(b"[]"),
    "an entry that is a number": weights(b'{"weight": 1}'),
    "no offsets": weights(b'{"weight": {"dtype": "F32", "shape": [1000]}}'),
    "offsets beyond the end": weights(b'{"weight": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}'),
    "fewer bytes than its shape": weights(b'{"weight": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 16]}}'),
    "negative offsets": weights(b'{"weight": {"dtype": "F32", "shape": [1000], "data_offsets": [-4000, 0]}}'),
}


def look(verb: str, path: Path | str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main([verb, str(path)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "\x1b" not in out + err
    return code, out + err


@pytest.mark.parametrize("harm", [*NO_MANIFEST.items(), *WRONG_FIELDS.items()], ids=lambda harm: harm[0])
def test_a_manifest_that_is_none(run_dir, harm, capsys):
    """For people one message; for a resume no checkpoint, so that the one before it counts."""
    newest = step_dir(run_dir, 4)
    harm[1](newest)
    for verb in VERBS:
        code, said = look(verb, newest, capsys)
        assert code == 1
        assert len([line for line in said.splitlines() if str(newest) in line]) == 1
    # The intact one beside it is still told of.
    assert look("list", run_dir, capsys)[1].count(" committed") == 1 + (harm[0] in ("nothing", "a dangling link"))
    assert look("verify", run_dir, capsys)[1].count(": intact") == 1
    alone = Coordinator(LoneTransport())
    assert newest_usable(run_dir, alone) == step_dir(run_dir, 2)
    assert driver_state_of(newest) is None
    assert newest_run_id(run_dir) == "r"
    retire(run_dir, CheckpointConfig(max_to_keep=1, keep_best=1), 4, Deleter(), alone)
    assert steps(run_dir)[-1] == 4


@pytest.mark.parametrize("harm", WRONG_FILES.items(), ids=lambda harm: harm[0])
def test_a_file_that_is_none(run_dir, harm, capsys):
    newest = step_dir(run_dir, 4)
    harm[1](newest)
    code, said = look("verify", newest, capsys)
    assert code == 1
    assert f"{newest} is damaged: " in said
    assert look("list", newest, capsys)[0] == 0
    assert look("inspect", newest, capsys)[0] == (1 if DRIVER_STATE in said else 0)
    assert newest_usable(run_dir, Coordinator(LoneTransport())) == step_dir(run_dir, 2)


@pytest.mark.parametrize("harm", WRONG_DOCUMENTS.items(), ids=lambda harm: harm[0])
def test_a_document_of_another_form_is_damage_for_whoever_reads_it(tmp_path, run_dir, harm, capsys):
    newest = step_dir(run_dir, 4)
    harm[1](newest)
    code, said = look("inspect", newest, capsys)
    assert code == 1
    assert f"{newest} is damaged: " in said
    assert [look(verb, newest, capsys)[0] for verb in ("list", "verify")] == [0, 0]
    config = make_config(tmp_path)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    assert resume(config, PlainRole()) == 2
    assert (run_dir / "global_step_4.damaged-1").is_dir()


@pytest.mark.parametrize("lie", LYING_WEIGHTS.items(), ids=lambda lie: lie[0])
def test_weights_with_a_lying_header_are_damage(tmp_path, lie, capsys):
    config = make_config(tmp_path)
    config.checkpoint.contents = ["hf_model"]
    save_steps(config, PlainRole(), 2, 4)
    newest = step_dir(config.run_dir, 4)
    proven(WEIGHTS, lie[1])(newest)
    assert [look(verb, newest, capsys)[0] for verb in VERBS] == [0, 0, 0]
    if lie[0] == "no tensors":  # which is true, and of another model
        with pytest.raises(UserError, match="another architecture"):
            resume(config, PlainRole())
    else:
        assert resume(config, PlainRole()) == 2


def other_tool(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 10)
    return folder


def hugging_face(folder: Path) -> Path:
    other_tool(folder, "config.json", "tokenizer.json")
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    return folder


def not_to_be_entered(folder: Path) -> Path:
    folder.mkdir(mode=0o000)
    return folder


FOREIGN: dict[str, tuple[Callable[[Path], Path], int]] = {
    "nothing": (lambda folder: folder / "nothing", 2),
    "an empty folder": (other_tool, 2),
    "a file": (lambda folder: other_tool(folder, "a") / "a", 2),
    "a file that is called a checkpoint": (lambda folder: other_tool(folder, "global_step_4") / "global_step_4", 2),
    "a device": (lambda folder: Path("/dev/null"), 2),
    "a file below a file": (lambda folder: other_tool(folder, "a") / "a/b", 2),
    "a name too long": (lambda folder: folder / ("x" * 300), 2),
    "a name with a zero byte": (lambda folder: folder / "a\0b", 2),
    "a name that is no text": (lambda folder: folder / os.fsdecode(b"\xff\xfe"), 2),
    "a name with escapes": (lambda folder: folder / "\x1b[31mred\x07", 2),
    "Hugging Face": (hugging_face, 2),
    "the Hugging Face trainer": (
        lambda folder: other_tool(folder, "checkpoint-500/trainer_state.json", "checkpoint-500/optimizer.pt"),
        2,
    ),
    "DeepSpeed": (
        lambda folder: other_tool(folder, "global_step20/mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py"),
        2,
    ),
    "verl": (
        lambda folder: other_tool(
            folder,
            "global_step_20/actor/model_world_size_2_rank_0.pt",
            "global_step_20/data.pt",
            "latest_checkpointed_iteration.txt",
        ),
        1,
    ),
    "torch": (lambda folder: other_tool(folder, ".metadata", "__0_0.distcp"), 2),
    "names that are almost ours": (
        lambda folder: other_tool(folder, "global_step_04/x", "global_step_-1/x", "global_step_\u0664/x"),
        2,
    ),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("foreign", FOREIGN.items(), ids=lambda foreign: foreign[0])
def test_what_is_not_ours_is_one_message(tmp_path, foreign, verb, capsys):
    make, expected = foreign[1]
    (tmp_path / "folder").mkdir()
    path = make(tmp_path / "folder")
    code, said = look(verb, path, capsys)
    assert code == expected
    if expected == 2:
        assert len(said.splitlines()) == 1
        assert "Give a run directory" in said


@pytest.mark.parametrize("verb", VERBS)
def test_links_in_a_circle_are_one_message(tmp_path, verb, capsys):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    code, said = look(verb, tmp_path / "a", capsys)
    assert (code, len(said.splitlines())) == (2, 1)
    (tmp_path / "global_step_2").symlink_to("global_step_2")
    assert look(verb, tmp_path, capsys)[0] == 2


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("what", ["the run", "a checkpoint", "a manifest", "a file"])
def test_what_may_not_be_read_is_one_message(saved, verb, what, capsys):
    with tempfile.TemporaryDirectory() as folder:  # one that others than its owner may enter
        run_dir = shutil.copytree(saved, Path(folder, "run"))
        newest = step_dir(run_dir, 4)
        look(verb, run_dir, capsys)  # imports what it needs while it may
        Path(folder).chmod(0o755)
        closed = {
            "the run": run_dir,
            "a checkpoint": newest,
            "a manifest": newest / MANIFEST,
            "a file": newest / CONFIG,
        }
        closed[what].chmod(0)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            code, said = look(verb, run_dir, capsys)
        finally:
            os.seteuid(user)
            closed[what].chmod(0o755)
    if what == "a file" and verb != "verify":
        assert code == 0
        return
    assert code == (2 if what == "the run" else 1)
    assert "Permission denied" in said
    assert ("intact" in said) == (verb == "verify" and what != "the run")


@pytest.mark.parametrize("name", [POINTER, RESOLVED])
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("[" * 3_000),
        lambda path: path.write_text("checkpoint: {max_to_keep: x, keep_every: [], keep_best: null, best_metric: 3}"),
        lambda path: path.write_text("checkpoint: 5"),
        lambda path: path.symlink_to(path.name),
        sparse,
    ],
    ids=["pipe", "folder", "binary", "deep", "wrong types", "a number", "circle", "terabyte"],
)
def test_a_hint_of_any_kind_does_not_hide_the_checkpoints(run_dir, name, make, capsys):
    (run_dir / name).unlink(missing_ok=True)
    make(run_dir / name)
    code, said = look("list", run_dir, capsys)
    assert code == 0
    assert said.count(" committed") == 2


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"\xff"), lambda path: path.write_text("[]"), sparse],
    ids=["pipe", "folder", "binary", "list", "terabyte"],
)
def test_a_run_file_that_is_none_is_a_users_mistake(run_dir, make):
    (run_dir / RUN_FILE).unlink(missing_ok=True)
    make(run_dir / RUN_FILE)
    with pytest.raises(UserError, match="Remove it: the newest checkpoint"):
        read_run_file(run_dir)
