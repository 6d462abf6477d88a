"""Memory that is available for copies of saves, read from the files of several kinds of systems."""

from pathlib import Path

import pytest

from rlhf.checkpoint.save import host_memory
from rlhf.checkpoint.save.host_memory import available_memory, check_memory
from rlhf.errors import UserError
from rlhf.storage.hf_layout import ADAPTER_CONFIG
from tests.support.checkpoints import PlainRole, make_checkpointer, make_config
from tests.support.thread_ranks import make_coordinator, run_thread_ranks

MIB = 1 << 20


def system(folder: Path, files: dict[str, str]) -> int | None:
    """Return the available memory of a machine with `files`; its kernel reports 100 MiB."""
    for name, text in {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {100 * 1024} kB\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return available_memory(folder / "proc", folder / "groups")


def test_available_memory_without_cgroup_limits_is_the_kernels_figure(tmp_path):
    assert system(tmp_path, {}) == 100 * MIB
    assert system(tmp_path, {"proc/self/cgroup": "0::/job\n", "groups/job/memory.max": "max\n"}) == 100 * MIB
    assert available_memory(tmp_path / "nothing", tmp_path / "nothing") is None
    assert 0 < (available_memory() or 0) < 1 << 50


def test_cgroup_limits_count_minus_used_memory_without_droppable_cache(tmp_path):
    files = {
        "proc/self/cgroup": "0::/slice/job\n",
        "groups/slice/job/memory.max": f"{60 * MIB}\n",
        "groups/slice/job/memory.current": f"{30 * MIB}\n",
        "groups/slice/job/memory.stat": f"anon {20 * MIB}\ninactive_file {10 * MIB}\n",
    }
    assert system(tmp_path, files) == 40 * MIB
    # The parent cgroup has less memory left.
    files |= {"groups/slice/memory.max": f"{90 * MIB}\n", "groups/slice/memory.current": f"{85 * MIB}\n"}
    assert system(tmp_path, files) == 5 * MIB
    files |= {"groups/slice/memory.current": f"{95 * MIB}\n"}
    assert system(tmp_path, files) == 0


def test_limits_of_the_first_version_and_of_a_container(tmp_path):
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/host/path/of/it\n0::/\n",
        "groups/memory/memory.limit_in_bytes": f"{50 * MIB}\n",
        "groups/memory/memory.usage_in_bytes": f"{20 * MIB}\n",
        "groups/memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {MIB}\n",
    }
    assert system(tmp_path, files) == 31 * MIB


def check_on_rank(rank: int, nbytes: int) -> str | None:
    try:
        check_memory(nbytes, make_coordinator())
    except UserError as error:
        return str(error)
    return None


def test_ranks_of_one_machine_need_the_sum(monkeypatch):
    monkeypatch.setattr(host_memory, "available_memory", lambda: 15 * MIB)
    assert run_thread_ranks(2, check_on_rank, 7 * MIB) == [None, None]
    for message in run_thread_ranks(2, check_on_rank, 8 * MIB):
        assert "(2) need 16.0 MiB of memory, and 15.0 MiB are available there" in str(message)
        assert "checkpoint.async_save=false" in str(message)
    monkeypatch.setattr(host_memory, "available_memory", lambda: None)
    assert run_thread_ranks(2, check_on_rank, 8 * MIB) == [None, None]


def test_a_run_whose_copies_do_not_fit_ends_before_it_trains(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    role = PlainRole(100_000)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 799_999)
    assert not make_checkpointer(config, role).resume()  # each save is waited for, and needs no copy
    config.checkpoint.async_save = True
    with pytest.raises(UserError, match=r"need 0\.8 MiB of memory"):
        make_checkpointer(config, role).resume()
    monkeypatch.setattr(host_memory, "available_memory", lambda: 10**9)
    checkpointer = make_checkpointer(config, role, step=1)
    assert not checkpointer.resume()
    # A rollback in the running process needs no memory for a copy, because the copy exists already.
    assert checkpointer.save(1) is None
    checkpointer.finish()
    monkeypatch.setattr(host_memory, "available_memory", lambda: 0)
    assert checkpointer.resume()


class MergedRole(PlainRole):
    """A role whose weight is an adapter's; the merged model has 900,000 bytes."""

    def hf_files(self):
        return {ADAPTER_CONFIG: b"{}"}

    def merged_bytes(self):
        return 900_000


def test_a_model_merged_for_each_save_is_counted(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    config.checkpoint.async_save, config.checkpoint.contents = True, ["model", "optimizer", "extra", "hf_model"]
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1_699_999)
    assert not make_checkpointer(config, MergedRole(100_000)).resume()  # an adapter needs only its weights' copy
    config.checkpoint.hf_adapter = "merge"
    with pytest.raises(UserError, match=r"need 1\.6 MiB of memory"):
        make_checkpointer(config, MergedRole(100_000)).resume()
    config.checkpoint.contents.remove("hf_model")
    assert not make_checkpointer(config, MergedRole(100_000)).resume()


def save_and_go_back(rank: int, folder: Path) -> bool:
    """Save and roll back on one of two ranks; the second rank has nothing to write, and so no copies."""
    config = make_config(folder)
    config.checkpoint.async_save = True
    checkpointer = make_checkpointer(config, PlainRole(1, rank, 2), step=1, coordinator=make_coordinator())
    checkpointer.resume()
    checkpointer.save(1)
    checkpointer.finish()
    return checkpointer.resume()


def test_ranks_with_and_without_copies_roll_back_together(tmp_path):
    assert run_thread_ranks(2, save_and_go_back, tmp_path) == [True, True]
