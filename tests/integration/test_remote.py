"""Copies of checkpoints in a remote folder."""

import json
import logging
import shutil
import tracemalloc
import uuid

import fsspec
import pytest

from rlhf.checkpoint.remote.remote_store import COPY
from rlhf.errors import UserError
from rlhf.storage.layout import HISTORY, MANIFEST, RUN_FILE, UPLOAD, scan, step_dir
from tests.support.checkpoints import (
    PlainReference,
    PlainRole,
    equal_bits,
    files_of,
    make_checkpointer,
    make_driver,
    resume,
)
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.launching import flip_a_byte, small
from tests.support.remotes import (
    DEADLINE_S,
    FAULTS,
    assert_same_files,
    complete_steps,
    copy_all,
    kill_once_copied,
    make_run,
    on_empty_disk,
    remote_dir,
    save,
    start_from_remote,
)
from tests.support.sections import open_remote, remote_copies, remote_store
from tests.support.undisturbed import EXPORT
from tests.support.verified import verify

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path) -> str:
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/remote"


def test_a_copy_comes_back_as_it_was(tmp_path, url):
    config = make_run(tmp_path / "a", 2, 4, remote=url)
    save(config, 6)
    assert copy_all(config) == []
    assert complete_steps(config) == [6, 4, 2]

    other = on_empty_disk(config, tmp_path / "b")
    assert start_from_remote(other) == 6
    assert [path.name for path in scan(other.run_dir)] == ["global_step_6"]
    assert_same_files(step_dir(config.run_dir, 6), step_dir(other.run_dir, 6))
    for name in (RUN_FILE, HISTORY):
        assert (other.run_dir / name).read_bytes() == (config.run_dir / name).read_bytes()
    role = PlainRole()
    assert resume(other, role) == 6
    assert equal_bits(role.weight, PlainRole(seed=6).weight)


def test_a_long_history_is_copied_in_parts_both_ways(tmp_path, folder_url):
    config = make_run(tmp_path / "a", remote=folder_url)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "note": str(step) * 30_000}) + "\n" for step in range(1, 600)]
    (config.run_dir / HISTORY).write_text("".join(lines))
    save(config, 599)
    size = (config.run_dir / HISTORY).stat().st_size
    tracemalloc.start()
    copy_all(config)
    other = on_empty_disk(config, tmp_path / "b")
    assert start_from_remote(other) == 599
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (other.run_dir / HISTORY).read_bytes() == (config.run_dir / HISTORY).read_bytes()
    assert size > 48 << 20
    assert peak < size


def test_the_remote_folder_has_the_files_of_the_run(tmp_path, folder_url):
    config = make_run(tmp_path / "a", 2, remote=folder_url)
    save(config, 4)
    copy_all(config)
    there = remote_dir(tmp_path, 2)
    ours = {"run/run.json", "run/metrics.jsonl", COPY}
    assert files_of(there) == files_of(step_dir(config.run_dir, 2)) | ours
    # A tool that knows nothing of remote copies can use the folder as it is.
    assert verify(there).step == 2
    assert [json.loads(line)["step"] for line in (there / "run" / HISTORY).read_text().splitlines()] == [1, 2]
    assert sorted(path.name for path in there.parent.iterdir()) == ["global_step_2", "global_step_4", RUN_FILE]


def test_the_newest_checkpoint_is_copied_first_and_its_manifest_last(tmp_path):
    config = make_run(tmp_path / "a", 2, 4, remote=f"faulty://{tmp_path}/remote")
    assert copy_all(config) == []
    written = [path.partition("default/")[2] for call, path in FAULTS.calls if call == "open wb"]
    assert written[0] == RUN_FILE
    steps = [name.partition("/")[0] for name in written[1:]]
    assert steps == sorted(steps, key=lambda name: name != "global_step_4")
    for step in ("global_step_4", "global_step_2"):
        of_step = [name for name in written if name.startswith(step)]
        assert of_step[-2:] == [f"{step}/{COPY}", f"{step}/{MANIFEST}"]
        assert len(of_step) == len(set(of_step))


def test_only_what_is_missing_is_copied(tmp_path):
    config = make_run(tmp_path / "a", 2, remote=f"faulty://{tmp_path}/remote")
    copy_all(config)
    FAULTS.__init__()
    save(config, 4)
    assert copy_all(config) == []
    written = {path.partition("default/")[2].partition("/")[0] for call, path in FAULTS.calls if call == "open wb"}
    assert written == {"global_step_4"}


def test_a_published_checkpoint_is_copied_in_the_running_process(tmp_path, folder_url):
    config = make_run(tmp_path / "a", remote=folder_url)
    copies = remote_copies(config)
    copies.start()
    for step in (2, 4):
        save(config, step)
        copies.published(step_dir(config.run_dir, step))
    assert copies.finish(DEADLINE_S) == []
    assert complete_steps(config) == [4, 2]
    figures = copies.metrics()
    assert figures["perf/remote_pending"] == figures["perf/remote_failures"] == 0
    sizes = [path.stat().st_size for step in (2, 4) for path in remote_dir(tmp_path, step).rglob("*") if path.is_file()]
    overhead = sum((remote_dir(tmp_path, step) / name).stat().st_size for step in (2, 4) for name in (COPY, MANIFEST))
    assert figures["perf/remote_bytes"] == sum(sizes) - overhead
    assert figures["perf/remote_seconds"] > 0
    assert copies.metrics().keys() == {"perf/remote_pending", "perf/remote_failures"}


def test_remote_retention_is_apart_from_the_local_one(tmp_path, url):
    config = make_run(tmp_path / "a", 2, 4, 6, 8, remote=url)
    config.checkpoint.remote_max_to_keep = 2
    assert copy_all(config) == []
    assert complete_steps(config) == remote_store(config).steps() == [8, 6]
    assert len(scan(config.run_dir)) == 4

    config.checkpoint.max_to_keep = 1
    save(config, 10)
    assert copy_all(config) == []
    assert complete_steps(config) == remote_store(config).steps() == [10, 8]
    assert [path.name for path in scan(config.run_dir)] == ["global_step_10"]


def test_the_manifest_is_removed_first(tmp_path):
    config = make_run(tmp_path / "a", 2, remote=f"faulty://{tmp_path}/remote")
    copy_all(config)
    config.checkpoint.remote_max_to_keep = 1
    FAULTS.__init__()
    save(config, 4)
    assert copy_all(config) == []
    calls = [(call, path.partition("default/")[2]) for call, path in FAULTS.calls]
    removals = [path for call, path in calls if call == "rm_file" and path.startswith("global_step_2/")]
    assert removals[0] == f"global_step_2/{MANIFEST}"
    # No file of the old copy is removed before the new copy is complete.
    assert calls.index(("open wb", f"global_step_4/{MANIFEST}")) < calls.index(("rm_file", removals[0]))


def test_local_retention_does_not_interrupt_a_copy(tmp_path, caplog):
    config = make_run(tmp_path / "a", 2, remote=f"faulty://{tmp_path}/remote")

    def remove_it(number: int, call: str, path: str) -> None:
        if call == "write" and "global_step_2" in path:
            assert list(config.run_dir.glob(f"{UPLOAD}*"))
            shutil.rmtree(step_dir(config.run_dir, 2), ignore_errors=True)

    FAULTS.before = remove_it
    assert copy_all(config) == []
    assert scan(config.run_dir) == []
    assert complete_steps(config) == [2]
    verify(remote_dir(tmp_path, 2))
    assert not list(config.run_dir.glob(f"{UPLOAD}*"))


def test_a_checkpoint_removed_before_its_copy_is_skipped(tmp_path, folder_url, caplog):
    caplog.set_level(logging.INFO)
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copies = remote_copies(config)
    copies.published(step_dir(config.run_dir, 2))
    shutil.rmtree(step_dir(config.run_dir, 2))
    copies.start()
    assert copies.finish(DEADLINE_S) == []
    assert complete_steps(config) == [4]
    assert "global_step_2 was removed before the run could copy it" in caplog.text


def test_room_for_a_save_goes_before_a_copy_that_nothing_else_keeps(tmp_path, caplog):
    config = make_run(tmp_path / "a", 2, remote=f"faulty://{tmp_path}/remote")
    copies = remote_copies(config)

    def short_of_room(number: int, call: str, path: str) -> None:
        if call == "open wb" and "global_step_2" in path:
            copies.cancel_copy()
            assert list(config.run_dir.glob(f"{UPLOAD}*")), "it still has a name in the run directory"
            shutil.rmtree(step_dir(config.run_dir, 2), ignore_errors=True)
            copies.cancel_copy()
            assert not list(config.run_dir.glob(f"{UPLOAD}*"))
            FAULTS.before = lambda number, call, path: None

    FAULTS.before = short_of_room
    copies.start()
    assert copies.finish(DEADLINE_S) == []
    assert complete_steps(config) == remote_store(config).steps() == []
    assert "a save needs its disk space" in caplog.text


def test_a_damaged_local_checkpoint_never_becomes_a_complete_copy(tmp_path, folder_url, caplog):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    flip_a_byte(step_dir(config.run_dir, 4) / "actor/model/rank_00000.safetensors")
    assert copy_all(config) == []
    assert complete_steps(config) == remote_store(config).steps() == [2]
    assert "differs from its hash" in caplog.text


@pytest.mark.parametrize("harm", ["flip", "remove", "a folder"])
def test_a_damaged_local_manifest_costs_no_copy(tmp_path, folder_url, harm, caplog):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copy_all(config)
    manifest = step_dir(config.run_dir, 2) / MANIFEST
    if harm == "flip":
        flip_a_byte(manifest)
    else:
        manifest.unlink()
        if harm == "a folder":
            manifest.mkdir()
    assert copy_all(config) == []
    assert complete_steps(config) == [4, 2]
    verify(remote_dir(tmp_path, 2))
    assert start_from_remote(on_empty_disk(config, tmp_path / "b")) == 4


def test_a_damaged_checkpoint_does_not_replace_a_copy_of_another_trajectory(tmp_path, folder_url, caplog):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copy_all(config)
    before = (remote_dir(tmp_path, 4) / MANIFEST).read_bytes()
    shutil.rmtree(step_dir(config.run_dir, 4))
    make_checkpointer(config, PlainRole(seed=99), 4).save(4)
    flip_a_byte(step_dir(config.run_dir, 4) / "actor/model/rank_00000.safetensors")
    assert copy_all(config) == []
    assert "the existing copy is unchanged" in caplog.text
    assert (remote_dir(tmp_path, 4) / MANIFEST).read_bytes() == before
    verify(remote_dir(tmp_path, 4))


@pytest.mark.parametrize("place", [0, 1, 40, -3, -1])
def test_a_damaged_byte_in_a_copys_manifest_costs_none_of_its_files(tmp_path, folder_url, place):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copy_all(config)
    for step in (2, 4):
        manifest = remote_dir(tmp_path, step) / MANIFEST
        content = bytearray(manifest.read_bytes())
        content[place] ^= 0x80
        manifest.write_bytes(content)
    kept = files_of(remote_dir(tmp_path, 2))
    shutil.rmtree(step_dir(config.run_dir, 2))
    assert copy_all(config) == []
    # Step 4 still exists in the run directory and is copied again. Step 2 does not exist there. Its copy stays, because
    # a user may be able to repair it.
    assert complete_steps(config) == [4]
    assert files_of(remote_dir(tmp_path, 2)) == kept


def test_a_reference_that_two_checkpoints_share_is_whole_in_each_copy(tmp_path, folder_url):
    config = make_run(tmp_path / "a", remote=folder_url)
    driver, reference = make_driver(), PlainReference()
    checkpointer = make_checkpointer(config, PlainRole(), driver=driver, reference=reference)
    for driver.step in (2, 4):
        assert checkpointer.save(driver.step) is not None
    assert copy_all(config) == []
    shutil.rmtree(config.run_dir)
    config.checkpoint.remote_max_to_keep = 1
    assert start_from_remote(config) == 4
    assert verify(step_dir(config.run_dir, 4)).linked == {"ref/model": "global_step_2"}
    assert resume(config, PlainRole(), reference=PlainReference()) is not None


def test_the_copy_of_a_step_from_another_trajectory_is_replaced(tmp_path, folder_url):
    config = make_run(tmp_path / "a", 2, 4, remote=folder_url)
    copy_all(config)
    (remote_dir(tmp_path, 4) / "actor/model/rank_00007.safetensors").write_bytes(b"of more ranks")
    shutil.rmtree(step_dir(config.run_dir, 4))
    make_checkpointer(config, PlainRole(seed=99), 4).save(4)
    assert copy_all(config) == []
    there, here = remote_dir(tmp_path, 4), step_dir(config.run_dir, 4)
    assert (there / MANIFEST).read_bytes() == (here / MANIFEST).read_bytes()
    assert files_of(there) - files_of(here) == {"run/run.json", "run/metrics.jsonl", COPY}
    verify(there)


def test_the_write_check_of_a_remote_leaves_no_files(tmp_path, folder_url):
    config = make_run(tmp_path / "a", remote=folder_url)
    assert open_remote(config) is not None
    assert list((tmp_path / "remote/rlhf/default").iterdir()) == []
    config.checkpoint.remote = None
    assert open_remote(config) is None


def test_a_remote_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    config = make_run(tmp_path / "a", 2, remote=f"file://{tmp_path}/file/folder")
    with pytest.raises(UserError, match=r"checkpoint.remote=file://\S+: a small file cannot be written"):
        open_remote(config)


@pytest.mark.parametrize("below", ["", "/rlhf/default"])
def test_a_remote_inside_the_run_directory_is_rejected(tmp_path, below):
    config = make_run(tmp_path, 2, remote=f"file://{tmp_path}{below}")
    with pytest.raises(UserError, match="in the run directory"):
        open_remote(config)
    verify(step_dir(config.run_dir, 2))


@pytest.mark.slow
def test_from_the_command_line_onto_an_empty_disk(tmp_path, sums, undisturbed):
    """A run is killed, loses its disk, and is started by the same command on another machine. It ends like the
    undisturbed run, bit for bit."""
    settings = [f"checkpoint.remote=file://{tmp_path}/remote", "checkpoint.remote_max_to_keep=1"]
    there = tmp_path / "remote/rlhf/far"

    def start(disk: str, environment: dict[str, str] | None = None):
        return train_forked([*small(tmp_path / disk, "far", sums), *settings, EXPORT], environment)

    killed = start("first", kill_once_copied(there / "global_step_3", "metrics.before", 5))
    assert killed.code == -9, killed.output
    assert [path.name for path in scan(there)] == ["global_step_3"], killed.output
    verify(there / "global_step_3")

    done = start("second")
    assert done.code == 0, done.output
    assert "Fetching step 3" in done.output
    assert differences(tmp_path / "second/rlhf/far", undisturbed.run_dir(1), samples=False) == []
    run_ids = [
        json.loads((tmp_path / disk / "rlhf/far" / RUN_FILE).read_text())["run_id"] for disk in ("first", "second")
    ]
    assert run_ids[0] == run_ids[1]
    assert [path.name for path in scan(there)] == ["global_step_7"]

    # A start of a finished run makes the missing copies. A finished run is also restored completely.
    shutil.rmtree(there)
    assert start("second").code == 0
    assert [path.name for path in scan(there)] == ["global_step_7"]
    done = start("third")
    assert done.code == 0, done.output
    assert "is finished at step 7" in done.output
    assert differences(tmp_path / "third/rlhf/far", undisturbed.run_dir(1), samples=False) == []


def test_s3_over_http(tmp_path, s3):
    """Copies to and from a server that speaks S3's protocol."""
    config = make_run(tmp_path / "a", 2, 4, 6, remote="s3://bucket/backup")
    config.checkpoint.remote_max_to_keep = 2
    assert open_remote(config) is not None
    assert copy_all(config) == []
    assert complete_steps(config) == remote_store(config).steps() == [6, 4]
    other = on_empty_disk(config, tmp_path / "b")
    assert start_from_remote(other) == 6
    assert_same_files(step_dir(config.run_dir, 6), step_dir(other.run_dir, 6))
    config.checkpoint.remote = "s3://no-such-bucket/backup"
    with pytest.raises(UserError, match="a small file cannot be written"):
        open_remote(config)


@pytest.fixture
def s3(monkeypatch):
    pytest.importorskip("s3fs", reason="needs s3fs")
    server = pytest.importorskip("moto.server", reason="needs moto[s3,server]")
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    yield
    running.stop()
