from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.checkpoint.commit import publication
from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.manifest import describe
from rlhf.checkpoint.commit.publication import begin, publish
from rlhf.checkpoint.commit.removal import clean_leftovers, discard, set_aside
from rlhf.checkpoint.commit.retention import retire
from rlhf.checkpoint.save.snapshot import take_snapshot
from rlhf.checkpoint.save.writer import write_checkpoint
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.transport import Transport
from rlhf.storage import files
from rlhf.storage.disk_errors import SaveFailed
from rlhf.storage.files import write_file
from rlhf.storage.layout import POINTER, scan, set_aside_dirs, step_dir
from tests.support.checkpoints import IDENTITY, PlainReference, PlainRole, files_of, listening, make_driver
from tests.support.published import eventually
from tests.support.verified import verify

CONTENTS = ["model", "optimizer", "extra", "hf_model"]


def save(run_dir: Path, step: int, max_to_keep: int | None = None, reference=None, reference_at: Path | None = None):
    run_dir.mkdir(exist_ok=True)
    state = RunState({"actor": PlainRole()}, make_driver(step), reference=reference)
    snapshot = take_snapshot(step, CONTENTS, state, "", 0, reference_at)
    settings, deleter = CheckpointConfig(max_to_keep=max_to_keep), Deleter()
    try:
        return write_checkpoint(snapshot, run_dir, IDENTITY, Coordinator(GlooTransport()), settings, deleter)
    finally:
        assert deleter.wait(30)


def names(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.iterdir()}


def pointer(run_dir: Path) -> str | None:
    path = run_dir / POINTER
    return path.read_text() if path.exists() else None


class Witness:
    """Records the run directory's content at every event."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.seen: list[tuple[str, set[str], str | None, bool]] = []

    def __call__(self, event: str) -> None:
        manifest = any(self.run_dir.glob(".tmp-*/manifest.json"))
        self.seen.append((event, {n.split("-")[0] for n in names(self.run_dir)}, pointer(self.run_dir), manifest))


def test_each_window_of_a_save_leaves_the_old_state_or_the_new_one(tmp_path):
    # Promise 1.
    save(tmp_path, 2)
    witness = Witness(tmp_path)
    with listening(witness):
        save(tmp_path, 4, max_to_keep=1)

    before, after = {"global_step_2", ".tmp", POINTER}, {"global_step_2", "global_step_4", POINTER}
    writes = [entry for entry in witness.seen if entry[0] in ("commit.file_write", "commit.fsync")]
    # 11 files: two components with indices, schedule, RNG, two of the export, driver state, configuration, manifest.
    assert [entry[0] for entry in writes] == ["commit.file_write", "commit.fsync"] * 11
    # The manifest is the last file: it does not exist before it is opened for writing.
    assert [entry[1:] for entry in writes[:-2]] == [(before, "2\n", False)] * 20
    assert [entry[1:] for entry in writes[-2:]] == [(before, "2\n", True)] * 2
    assert [entry for entry in witness.seen if entry not in writes] == [
        ("commit.manifest", before, "2\n", False),
        ("commit.rename", before, "2\n", True),
        ("commit.pointer", after, "2\n", False),
        ("commit.published", after, "4\n", False),
        ("commit.prune", after, "4\n", False),
        ("commit.trash", {"global_step_4", ".trash", POINTER}, "4\n", False),
    ]
    assert [event for event, *_ in witness.seen].index("commit.manifest") == 20
    # The old checkpoint's bytes are deleted in the background, after the save.
    eventually(lambda: names(tmp_path) == {"global_step_4", POINTER})


def test_a_link_is_made_in_the_temporary_directory_and_made_durable_with_it(tmp_path, monkeypatch):
    reference = PlainReference()
    save(tmp_path, 2, reference=reference)
    fsynced = []
    fsync = files.fsync_dir
    monkeypatch.setattr(files, "fsync_dir", lambda path: (fsynced.append(path.name), fsync(path)))
    witness = Witness(tmp_path)
    with listening(witness):
        save(tmp_path, 4, reference=reference, reference_at=step_dir(tmp_path, 2))
    during = {"global_step_2", ".tmp", POINTER}, "2\n", False
    links = [entry for entry in witness.seen if entry[0] == "commit.link"]
    assert links == [("commit.link", *during)] * 2
    assert witness.seen[:2] == links
    assert {"ref", "model"} < set(fsynced)
    assert verify(step_dir(tmp_path, 4)).linked == {"ref/model": "global_step_2"}


def test_files_and_folders_are_synced_before_the_rename_and_the_pointer(tmp_path, monkeypatch):
    """The order of system calls: each file is fsynced, then its folders, then the rename, then the parent, then the
    pointer."""
    # Promise 2.
    calls: list[str] = []
    fsync, rename, replace_ = files.fsync_dir, Path.rename, Path.replace

    def where(path: Path) -> str:
        return str(path.relative_to(tmp_path)).partition("/")[2] if ".tmp-" in str(path) else path.name

    for module in (files, publication):
        monkeypatch.setattr(module, "fsync_dir", lambda path: (calls.append(f"fsync {where(path)}"), fsync(path)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (calls.append(f"rename to {to.name}"), rename(self, to))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (calls.append(f"replace {to.name}"), replace_(self, to))[1])
    with listening(lambda event: calls.append(event)):
        save(tmp_path, 2)
    calls = calls[calls.index("commit.manifest") :]
    assert calls[:3] == ["commit.manifest", "commit.file_write", "commit.fsync"]
    folders = calls[3 : calls.index("commit.rename")]
    wanted = {"actor", "actor/model", "actor/optimizer", "actor/extra", "actor/huggingface", "rng", ""}
    assert {line.removeprefix("fsync ") for line in folders} == wanted
    assert folders[-1] == "fsync "
    assert calls[calls.index("commit.rename") :] == [
        "commit.rename",
        "rename to global_step_2",
        f"fsync {tmp_path.name}",
        "commit.pointer",
        f"replace {POINTER}",
        f"fsync {tmp_path.name}",
        "commit.published",
    ]


def test_a_published_step_is_never_overwritten(tmp_path):
    # Promise 3.
    save(tmp_path, 2)
    before = {name: (step_dir(tmp_path, 2) / name).read_bytes() for name in files_of(step_dir(tmp_path, 2))}
    temporary = begin(tmp_path, 2)
    written = write_file(temporary, "driver_state.json", [b"{}"])
    manifest = replace(verify(step_dir(tmp_path, 2)), files=describe([written]))
    with pytest.raises(SaveFailed, match="never overwritten"):
        publish(tmp_path, temporary, manifest.step, manifest, Coordinator(GlooTransport()))
    assert not temporary.exists()
    assert {name: (step_dir(tmp_path, 2) / name).read_bytes() for name in files_of(step_dir(tmp_path, 2))} == before
    with pytest.raises(FileExistsError):
        write_file(step_dir(tmp_path, 2), "driver_state.json", [b"other"])
    assert verify(step_dir(tmp_path, 2)).step == 2


def test_begin_returns_a_new_name_each_time(tmp_path):
    assert len({begin(tmp_path, 3) for _ in range(50)}) == 50
    assert scan(tmp_path) == []


def test_set_aside_numbers_folders_and_moves_the_pointer_back(tmp_path):
    for step in (2, 4):
        save(tmp_path, step)
    assert set_aside(step_dir(tmp_path, 4), "damaged").name == "global_step_4.damaged-1"
    assert pointer(tmp_path) == "2\n"
    save(tmp_path, 4)
    assert set_aside(step_dir(tmp_path, 4), "damaged").name == "global_step_4.damaged-2"
    assert set_aside(step_dir(tmp_path, 2), "superseded").name == "global_step_2.superseded-1"
    assert pointer(tmp_path) is None
    assert scan(tmp_path) == []
    assert [path.name for path in set_aside_dirs(tmp_path, "damaged")] == [
        "global_step_4.damaged-1",
        "global_step_4.damaged-2",
    ]
    assert [path.name for path in set_aside_dirs(tmp_path, "superseded")] == ["global_step_2.superseded-1"]
    assert verify(tmp_path / "global_step_4.damaged-1").step == 4


def test_the_pointer_never_names_a_missing_checkpoint(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)

    def check(event: str) -> None:
        named = pointer(tmp_path)
        assert named is None or step_dir(tmp_path, int(named)).is_dir(), f"{event}: the pointer names {named}"

    rename, deleter = Path.rename, Deleter()

    def watched(self: Path, target: Path) -> Path:
        result = rename(self, target)
        check(f"rename to {target}")
        return result

    with listening(check), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", watched)
        save(tmp_path, 8, max_to_keep=2)
        set_aside(step_dir(tmp_path, 8), "damaged")
        retire(tmp_path, CheckpointConfig(max_to_keep=1), 99, deleter, Coordinator(Transport()))
        set_aside(step_dir(tmp_path, 6), "damaged")
    assert deleter.wait(30.0)


def test_discard_leaves_nothing_under_the_name_at_any_time(tmp_path):
    save(tmp_path, 2)
    during = []
    with listening(lambda event: during.append((event, names(tmp_path)))):
        discard(step_dir(tmp_path, 2))
    assert [event for event, _ in during] == ["commit.trash"]
    assert "global_step_2" not in during[0][1]
    assert names(tmp_path) == {POINTER}


def test_leftovers_of_every_kind_are_removed_and_nothing_else(tmp_path):
    # Promise 11.
    save(tmp_path, 2)
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "precious").touch()
    begin(tmp_path, 4)
    write_file(begin(tmp_path, 4), "actor/model/rank_00000.safetensors", [b"half"])
    (tmp_path / ".trash-global_step_1-abc").mkdir()
    # metrics.jsonl is rewritten through a file of this name; a kill may leave it.
    (tmp_path / ".tmp-metrics.jsonl").write_text("{}")
    (tmp_path / ".trash-link").symlink_to(target)
    assert len(clean_leftovers(tmp_path)) == 5
    assert names(tmp_path) == {"global_step_2", POINTER, "elsewhere"}
    assert (target / "precious").exists()
    assert clean_leftovers(tmp_path) == []
