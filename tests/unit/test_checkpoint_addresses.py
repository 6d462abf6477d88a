"""Checkpoint verbs on a folder of many runs and on remote folders, with output for users and for scripts."""

import json
import os
import shutil
import sys
import uuid
from pathlib import Path

import fsspec
import pytest

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.remote import retries
from rlhf.checkpoint.verbs import remote_runs
from rlhf.checkpoint.verbs.remote_runs import RemoteCheckpoint
from rlhf.config.resolved import to_yaml
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import PlainRole, flip_bit, make_config, save_steps
from tests.support.published import publish
from tests.support.remotes import FAULTS, copy_all, make_run

VERBS = ("list", "inspect", "verify")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run directory with checkpoints of steps 2 and 4."""
    config = make_config(tmp_path_factory.mktemp("saved"))
    save_steps(config, PlainRole(), 2, 4)
    return config.run_dir


@pytest.fixture
def tree(saved, tmp_path) -> Path:
    """Make three runs: two at the depth that the trainer uses, and one further down."""
    root = tmp_path / "checkpoints"
    for place in ("project/one", "project/two", "a/b/c/three"):
        shutil.copytree(saved, root / place)
    return root


def test_verbs_report_a_folder_tree_run_by_run(tree, command):
    names = [str(tree / place) for place in ("a/b/c/three", "project/one", "project/two")]
    code, out, err = command("list", tree)
    assert (code, err, out.count("committed")) == (0, "", 6)
    assert [line for line in out.splitlines() if line.startswith(str(tree))] == names
    code, out, _ = command("verify", tree)
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == [f"{n}/global_step_{s}" for n in names for s in (4, 2)]
    code, out, _ = command("inspect", tree)
    assert code == 0
    shown = [line.split()[-1] for line in out.splitlines() if line.startswith("checkpoint ")]
    assert shown == [f"{name}/global_step_4" for name in names]


def test_damage_in_one_run_does_not_hide_the_others(tree, command):
    flip_bit(tree / "project/one/global_step_4/manifest.json", 99)
    for verb, intact in (("list", "committed"), ("verify", ": intact"), ("inspect", "driver state")):
        code, out, _ = command(verb, tree)
        assert code == 1
        assert out.count(intact) == {"list": 5, "verify": 5, "inspect": 2}[verb]


def test_links_hidden_and_deep_folders_of_a_tree_are_skipped(tree, tmp_path, command):
    shutil.move(tree / "project/two", tmp_path / "elsewhere")
    (tree / "project/linked").symlink_to(tmp_path / "elsewhere")
    (tree / "circle").symlink_to(tree)
    shutil.copytree(tmp_path / "elsewhere", tree / ".hidden/run")
    shutil.copytree(tmp_path / "elsewhere", tree / "1/2/3/4/five")
    shutil.copytree(tmp_path / "elsewhere", tree / "project/one/rollout_model/run")
    runs = json.loads(command("list", tree, "--json")[1])["runs"]
    assert [run["path"] for run in runs] == [str(tree / "a/b/c/three"), str(tree / "project/one")]
    # A link that the command names is followed, and so is a global_step_N that is a link.
    assert command("list", tree / "project/linked")[1].count("committed") == 2


def test_an_unreadable_folder_of_a_tree_is_reported(tree, command, monkeypatch):
    scandir = os.scandir

    def fail(path):
        if Path(path).name == "two":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    for verb in VERBS:
        code, out, _ = command(verb, tree)
        assert code == 1
        assert out.splitlines()[-1] == f"{tree / 'project/two'} cannot be read: Permission denied"
        assert json.loads(command(verb, tree, "--json")[1])["unreadable"] == [out.splitlines()[-1]]


def test_list_and_verify_print_json_for_scripts(tmp_path, command):
    config = make_config(tmp_path)
    config.checkpoint.max_to_keep = 1
    publish(config.run_dir, 2, {"val/accuracy": float("nan")}, config=to_yaml(config))
    publish(config.run_dir, 4, {"val/accuracy": 0.5}, config=to_yaml(config))
    publish(config.run_dir, 6)
    flip_bit(step_dir(config.run_dir, 6) / "manifest.json", 99)
    (config.run_dir / "global_step_9.damaged-1").mkdir()
    code, out, _ = command("list", config.run_dir, "--json")
    (run,) = json.loads(out)["runs"]
    assert (code, run["path"], run["pointer"]) == (1, str(config.run_dir), "6")
    assert run["rules"] == {"max_to_keep": 1, "keep_every": None, "keep_best": 0, "best_metric": None}
    assert run["set_aside"] == [{"reason": "damaged", "name": "global_step_9.damaged-1"}]
    rows = run["checkpoints"]
    assert [(row["step"], row["state"], row["kept"]) for row in rows] == [
        (6, "damaged", ["newest"]),
        (4, "committed", []),
        (2, "committed", []),
    ]
    assert "manifest.json is damaged: " in rows[0]["problem"]
    assert [row.get("metrics") for row in rows] == [None, {"val/accuracy": 0.5}, {"val/accuracy": None}]
    code, out, _ = command("verify", config.run_dir, "--json")
    assert code == 1
    states = json.loads(out)["checkpoints"]
    assert [state["state"] for state in states] == ["damaged", "intact", "intact"]
    assert states[1]["files_here"] == states[1]["files"] == 2


def test_inspect_prints_json_details_for_scripts(saved, command):
    (details,) = json.loads(command("inspect", saved, "--json")[1])["checkpoints"]
    assert details["driver_state"]["step"] == details["step"] == 4
    weights = next(folder for folder in details["folders"] if folder["folder"] == "actor/model")
    assert weights["tensors"] == [{"name": "weight", "dtype": "F32", "shape": [1000], "shards": 1}]


@pytest.fixture(params=["memory", "file", "faulty"])
def remote(request, tmp_path, monkeypatch) -> str:
    """Return the remote folder of one run, with copies of steps 2 and 4, within the remote of all runs."""
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(retries, "LONGEST_WAIT_S", 0.02)
    FAULTS.__init__()
    place = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"{request.param}://{tmp_path}/remote"
    assert copy_all(make_run(tmp_path / "a", 2, 4, remote=place)) == []
    return f"{place}/rlhf/default"


def harm(remote: str, name: str, change) -> None:
    fs, root = fsspec.core.url_to_fs(remote)
    fs.pipe_file(f"{root}/{name}", change(fs.cat_file(f"{root}/{name}")))


def test_a_remote_folder_is_looked_at_without_a_disk(remote, command, tmp_path):
    command("inspect", remote)  # imports write their cache files here, before writes are noted
    written = []
    sys.addaudithook(lambda event, arguments: _note(written, event, arguments))
    _note.on = True
    try:
        for address in (remote, remote + "/", remote.removesuffix("/rlhf/default")):
            code, out, err = command("list", address)
            assert (code, err, out.count("committed")) == (0, "", 2)
            code, out, _ = command("verify", address)
            assert code == 0
            assert [line.split(": ")[0] for line in out.splitlines()] == [f"{remote}/global_step_{s}" for s in (4, 2)]
            code, out, _ = command("inspect", address)
            assert code == 0
            assert "weight.exp_avg  F32 [1000]  in 1 shard(s)" in out
    finally:
        _note.on = False
    assert [path for path in written if not _of_another_test(Path(path), tmp_path)] == []
    assert command("verify", f"{remote}/global_step_2")[1].count("intact") == 1


def _note(written: list, event: str, arguments: tuple) -> None:
    if getattr(_note, "on", False) and event == "open":
        path, _, flags = arguments
        if isinstance(path, str) and (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(path)


def _of_another_test(path: Path, tmp_path: Path) -> bool:
    """Return whether `path` belongs to another test. A thread that another test had left running once failed CI."""
    return path.is_relative_to(tmp_path.parent) and not path.is_relative_to(tmp_path)


WEIGHTS = "global_step_4/actor/model/rank_00000.safetensors"
DAMAGE = {
    "a bit": (WEIGHTS, lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:], "content differs from its hash"),
    "an end": (WEIGHTS, lambda raw: raw[:-9], "bytes instead of"),
    "one byte more": (WEIGHTS, lambda raw: raw + b"x", "bytes instead of"),
    "a manifest": ("global_step_4/manifest.json", lambda raw: raw[:-9], "is damaged"),
    "the step": ("global_step_4/manifest.json", None, "is of step 2, but its folder's name has another step"),
}


@pytest.mark.parametrize("damage", DAMAGE.items(), ids=lambda damage: damage[0])
def test_damage_in_a_remote_folder_is_found(remote, damage, command):
    name, change, message = damage[1]
    fs, root = fsspec.core.url_to_fs(remote)
    harm(remote, name, change or (lambda raw: fs.cat_file(f"{root}/global_step_2/manifest.json")))
    code, out, _ = command("verify", remote)
    assert code == 1
    assert message in out.splitlines()[0]
    assert out.splitlines()[1].startswith(f"{remote}/global_step_2: intact")


def test_missing_remote_files_and_folders_are_reported(remote, command):
    fs, root = fsspec.core.url_to_fs(remote)
    fs.rm_file(f"{root}/{WEIGHTS}")
    code, out, _ = command("verify", remote)
    assert (code, "rank_00000.safetensors: missing" in out) == (1, True)
    fs.rm_file(f"{root}/global_step_4/manifest.json")
    code, out, _ = command("list", remote)
    assert (code, "never committed, or its copy is in progress" in out) == (1, True)
    for address, message in (
        (f"{remote}/global_step_7", "does not exist"),
        (f"{remote}/nothing", "has no checkpoint"),
        ("nowhere://x", "cannot be read"),
    ):
        code, out, err = command("verify", address)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert message in err


@pytest.mark.parametrize("read", [False, True])
def test_a_remote_copy_that_is_removed_is_not_called_damaged(remote, read, command, monkeypatch):
    """The copy is removed before its manifest is read, or between the reads of manifest and files."""
    manifest = RemoteCheckpoint.manifest

    def removed(checkpoint: RemoteCheckpoint) -> Manifest:
        if checkpoint.step == 4:
            return manifest(checkpoint)
        found = manifest(checkpoint) if read else None
        checkpoint._store.remove(2)
        return found or manifest(checkpoint)

    monkeypatch.setattr(RemoteCheckpoint, "manifest", removed)
    code, out, _ = command("verify", remote)
    assert code == 0
    assert out.splitlines()[0].startswith(f"{remote}/global_step_4: intact")
    assert f"{remote}/global_step_2 was removed" in out.splitlines()[1]


def test_a_network_that_fails(tmp_path, command, monkeypatch):
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(retries, "LONGEST_WAIT_S", 0.02)
    FAULTS.__init__()
    place = f"faulty://{tmp_path}/remote"
    copy_all(make_run(tmp_path / "a", 2, 4, remote=place))
    remote = f"{place}/rlhf/default"
    FAULTS.__init__()
    failed = []

    def once(number, call, path):
        if call == "open rb" and path not in failed:
            failed.append(path)
            raise OSError(5, "asked for by the test", path)

    FAULTS.before = once
    assert command("verify", remote)[0] == 0
    assert len(failed) > 10

    def gone(number, call, path):
        if call == "open rb" and path.endswith(WEIGHTS):
            raise OSError(5, "asked for by the test", path)

    FAULTS.before = gone
    monkeypatch.setattr(remote_runs, "RETRY_S", 0.1)
    code, out, _ = command("verify", remote)
    assert code == 1
    assert "asked for by the test" in out.splitlines()[0]
    assert out.splitlines()[1].startswith(f"{remote}/global_step_2: intact")
