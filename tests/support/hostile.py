"""Forges checkpoints with manifests, files and documents that no trainer writes."""

import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.commit import manifest as manifest_module
from rlhf.checkpoint.commit.manifest import describe
from rlhf.storage.files import write_file
from rlhf.storage.layout import CONFIG, DRIVER_STATE, MANIFEST
from tests.support.checkpoints import PlainRole, make_config, make_driver, save_steps

VERBS = ("list", "inspect", "verify", "prune")
TIMEOUT_S = 20


@contextmanager
def short_timeouts() -> Iterator[None]:
    """Fail a test that waits too long, for example for a pipe."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"nothing for {TIMEOUT_S} s")

    before, (left_s, _) = signal.signal(signal.SIGALRM, hangs), signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
    try:
        yield
    finally:
        # pytest-timeout uses the same timer; without it, a hanging teardown would never end.
        signal.setitimer(signal.ITIMER_REAL, max(1, left_s - TIMEOUT_S) if left_s else 0)
        signal.signal(signal.SIGALRM, before)


def intact_run(folder: Path) -> Path:
    """Make a run directory with intact checkpoints of steps 2 and 4."""
    config = make_config(folder)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    save_steps(config, PlainRole(), 2, 4)
    return config.run_dir


def look(verb: str, path: Path | str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Return exit code and output of a verb, and check that the output is printable or, with --json, JSON."""
    code, output = _looked(verb, str(path), capsys, *options)
    again, document = _looked(verb, str(path), capsys, *options, "--json")
    assert again == code, f"{code}:\n{output}\n\n{again} with --json:\n{document}"
    if code != 2:
        assert json.loads(document).keys() <= {"runs", "checkpoints", "unreadable", "removed"}
    return code, output


def _looked(verb: str, path: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main([verb, path, *options])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "\x1b" not in out + err
    return code, out + err


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change a manifest's fields, with a valid checksum."""

    def harm(checkpoint: Path) -> None:
        payload = json.loads((checkpoint / MANIFEST).read_text())["payload"]
        changed = change(payload)
        (checkpoint / MANIFEST).write_bytes(manifest_module._text(payload if changed is None else changed))

    return harm


def field(name: str, value: object) -> Callable[[Path], None]:
    return manifest(lambda payload: payload | {name: value})


def entry(name: str, value: object) -> Callable[[Path], None]:
    """Add or replace a file's entry in the manifest."""
    return manifest(lambda payload: payload | {"files": payload["files"] | {name: value}})


def content(raw: bytes | str) -> Callable[[Path], None]:
    """Replace the manifest's bytes."""
    return lambda checkpoint: (checkpoint / MANIFEST).write_bytes(raw if isinstance(raw, bytes) else raw.encode())


def instead(make: Callable[[Path], object], name: str = MANIFEST) -> Callable[[Path], None]:
    """Replace a file by a different kind of file."""

    def harm(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        make(checkpoint / name)

    return harm


def with_hash(name: str, raw: bytes) -> Callable[[Path], None]:
    """Replace a file's bytes and its hash in the manifest."""

    def harm(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        written = describe([write_file(checkpoint, name, [raw])])
        manifest(lambda payload: payload | {"files": payload["files"] | written})(checkpoint)

    return harm


def bind(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path must be short
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
    "a manifest of a web app": content('{"name": "site", "icons": [], "start_url": "."}'),
    "a payload that is a list": content('{"payload": [1], "checksum": "0"}'),
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
    "metrics beyond all floats": field("metrics", {"val/accuracy": 10**400}),
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
    "a driver state that is a list": with_hash(DRIVER_STATE, b"[1]"),
    "a driver state of nothing": with_hash(DRIVER_STATE, b"{}"),
    "a driver state in words": with_hash(DRIVER_STATE, json.dumps(DRIVER | {"step": "four"}).encode()),
    "a driver state beyond all floats": with_hash(DRIVER_STATE, json.dumps(DRIVER | {"epochs": 10**400}).encode()),
    "a deep driver state": with_hash(DRIVER_STATE, b"[" * 100_000),
    "a driver state of another step": with_hash(DRIVER_STATE, json.dumps(DRIVER | {"step": 3}).encode()),
    "guards that are a list": with_hash(DRIVER_STATE, json.dumps(DRIVER | {"step": 4, "guards": []}).encode()),
    "a history that is a list": with_hash(DRIVER_STATE, json.dumps(DRIVER | {"step": 4, "history": [1]}).encode()),
    "an index that is a list": with_hash("actor/model/index.safetensors", weights(b"[]")),
    "an index of numbers": with_hash("actor/model/index.safetensors", weights(b'{"__metadata__": 5}')),
    "an index without shards": with_hash(
        "actor/model/index.safetensors", weights(b'{"__metadata__": {"tensors": "{}"}}')
    ),
}
GUARDS = {"reward_average": None, "skips": 0, "rollbacks": [], "row": []}


def stored(**states: object) -> Callable[[Path], None]:
    """Store these objects' states in the driver state of step 4, with a valid hash."""
    return with_hash(DRIVER_STATE, json.dumps(DRIVER | {"step": 4} | states).encode())


WRONG_STATES: dict[str, Callable[[Path], None]] = {
    "guards without an average": stored(guards={"row": "x"}),
    "an average in words": stored(guards=GUARDS | {"reward_average": "high"}),
    "skips in words": stored(guards=GUARDS | {"skips": "many"}),
    "rollbacks of one number": stored(guards=GUARDS | {"rollbacks": [1]}),
    "a history without a mark": stored(history={"run_id": "r"}),
    "a history with a size in words": stored(history={"run_id": "r", "mark": {"size": "big", "tail": ""}}),
    "a negative size of the history": stored(history={"run_id": "r", "mark": {"size": -1, "tail": ""}}),
    "a schedule without a position": with_hash("actor/extra/lr_scheduler.json", b"{}"),
    "a schedule that is a list": with_hash("actor/extra/lr_scheduler.json", b"[1]"),
    "generators of one byte": with_hash(
        "rng/rank_00000.safetensors",
        weights(b'{"torch.cpu": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}'),
    ),
}
"""Content whose bytes match their hashes, but that no trainer writes. Only a load finds the problem."""
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
