"""Two machines with one remote folder. One copies. The other ends with an error, waits for the lease of a dead machine,
or finds that it lost its own lease."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf.checkpoint.remote import lease as lease_module
from rlhf.checkpoint.remote import retries
from rlhf.checkpoint.remote.lease import LEASE, Lease, release_leases
from rlhf.checkpoint.remote.remote_store import RemoteStore
from rlhf.errors import UserError
from rlhf.storage.layout import step_dir
from tests.support.published import eventually
from tests.support.remotes import DEADLINE_S, complete_steps, copy_all, long_retries, make_run, on_empty_disk, save
from tests.support.sections import prepare, remote_copies, remote_store

EXPIRY_S = 0.6
LONG_S = 60.0
"""Expiry for tests with a live machine: a delay of this process must not make that machine look dead."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("RENEW_S", 0.05), ("EXPIRY_S", EXPIRY_S), ("POLL_S", 0.02), ("SETTLE_S", 0.1)):
        monkeypatch.setattr(lease_module, name, seconds)
    monkeypatch.setattr(lease_module, "READ_AGAIN_S", 0.02)
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(retries, "POLL_S", 0.02)


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path) -> RemoteStore:
    return RemoteStore(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/remote")


@pytest.fixture
def leases() -> Iterator[list[Lease]]:
    """Release every lease of a test."""
    opened: list[Lease] = []
    yield opened
    for lease in opened:
        lease.release()


def machine(name: str, store: RemoteStore, tmp_path: Path, leases: list[Lease]) -> Lease:
    """Return the lease of machine `name`, with its own run directory."""
    run_dir = tmp_path / name
    run_dir.mkdir(exist_ok=True)
    leases.append(Lease(store, run_dir, long_retries()))
    leases[-1]._me |= {"host": name, "machine": name}
    return leases[-1]


def holds(lease: Lease) -> bool:
    try:
        lease.confirm()
    except UserError:
        return False
    return True


def die(lease: Lease) -> None:
    """Stop the renewals without releasing the lease, and wait for a renewal in progress."""
    lease._stop.set()
    for thread in threading.enumerate():
        if getattr(thread, "_target", None) == lease._keep:
            thread.join(DEADLINE_S)


def test_a_second_machine_is_rejected_and_the_holder_named(store, tmp_path, leases, monkeypatch):
    first, second = (machine(name, store, tmp_path, leases) for name in ("alpha", "beta"))
    first.acquire()
    monkeypatch.setattr(lease_module, "EXPIRY_S", LONG_S)
    with pytest.raises(UserError, match=rf"is in use by alpha \({tmp_path}/alpha, process {os.getpid()}\)"):
        second.acquire()
    time.sleep(2 * EXPIRY_S)
    with pytest.raises(UserError, match="is in use by alpha"):
        second.acquire()
    first.confirm()
    # Another process or the next start of the same run continues at once.
    machine("alpha", store, tmp_path, leases).acquire()


def test_the_lease_of_a_dead_machine_ends_by_itself(store, tmp_path, leases):
    first, second = (machine(name, store, tmp_path, leases) for name in ("alpha", "beta"))
    first.acquire()
    die(first)
    started = time.monotonic()
    second.acquire()
    assert EXPIRY_S <= time.monotonic() - started < LONG_S
    # The first machine was only disconnected, and is back.
    with pytest.raises(UserError, match="is in use by beta"):
        first.confirm()
    first.release()
    second.confirm()


def test_a_released_lease_is_free_at_once(store, tmp_path, leases, monkeypatch):
    monkeypatch.setattr(lease_module, "EXPIRY_S", LONG_S)
    first, second = (machine(name, store, tmp_path, leases) for name in ("alpha", "beta"))
    first.acquire()
    first.release()
    assert store.read(LEASE) is None
    second.acquire()


def test_a_renewal_under_way_does_not_outlive_the_lease(store, tmp_path, leases, monkeypatch):
    monkeypatch.setattr(lease_module, "RELEASE_S", LONG_S)
    lease = machine("alpha", store, tmp_path, leases)
    lease.acquire()
    write, begun, go_on, written = store.write, threading.Event(), threading.Event(), threading.Event()

    def slowly(*arguments) -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        write(*arguments)
        written.set()

    monkeypatch.setattr(store, "write", slowly)
    assert begun.wait(DEADLINE_S)
    giving_back = threading.Thread(target=lease.release)
    giving_back.start()
    giving_back.join(0.3)  # if it did not wait for the renewal, the release would have ended by now
    go_on.set()
    giving_back.join(DEADLINE_S)
    assert written.wait(DEADLINE_S)
    assert store.read(LEASE) is None


def test_the_lease_of_a_dead_process_on_this_machine_is_free_at_once(store, tmp_path, leases, monkeypatch):
    monkeypatch.setattr(lease_module, "EXPIRY_S", LONG_S)
    first, second = (machine(name, store, tmp_path, leases) for name in ("alpha", "beta"))
    first.acquire()
    die(first)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store.write(LEASE, [json.dumps(json.loads(store.read(LEASE) or b"") | {"pid": ended.pid}).encode()])
    second._me["machine"] = "alpha"
    second.acquire()
    second.confirm()


def test_processes_of_one_run_that_renew_at_the_same_time_keep_it(tmp_path, leases):
    store = RemoteStore(f"file://{tmp_path}/remote")
    supervisor, rank = (machine("alpha", store, tmp_path, leases) for _ in range(2))
    supervisor.acquire()
    rank.acquire()
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.0005):
            # A write of the rank can truncate the file before this write has read its size. The run then writes again.
            with suppress(OSError):
                supervisor._renew()

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        for _ in range(200):
            rank.confirm()
    finally:
        over.set()
        renewing.join(DEADLINE_S)
    supervisor.check()


def test_a_lease_torn_by_a_kill_stays_with_its_run(store, tmp_path, leases):
    supervisor, rank = (machine("alpha", store, tmp_path, leases) for _ in range(2))
    supervisor.acquire()
    rank.acquire()
    die(rank)
    die(supervisor)
    for holder in (supervisor, rank):
        store.write(LEASE, [b'{"host": "al'])
        holder.confirm()
        assert b"alpha" in (store.read(LEASE) or b"")
    supervisor._stop.clear()
    store.write(LEASE, [b""])
    supervisor._renew()
    supervisor.check()
    assert b"alpha" in (store.read(LEASE) or b"")


def test_only_one_of_several_racing_machines_gets_the_lease(store, tmp_path, leases, monkeypatch):
    monkeypatch.setattr(lease_module, "SETTLE_S", 1.0)
    racing = [machine(f"host-{number}", store, tmp_path, leases) for number in range(8)]
    acquired: list[Lease] = []
    together = threading.Barrier(len(racing))

    def race(lease: Lease) -> None:
        together.wait(DEADLINE_S)
        with suppress(UserError):
            lease.acquire()
            acquired.append(lease)

    for over in ("nobody's", "a dead one's"):
        acquired.clear()
        threads = [threading.Thread(target=race, args=(lease,)) for lease in racing]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        # If two machines took the lease more than SETTLE_S apart, the first one sees its loss at the next check.
        assert [holds(lease) for lease in acquired].count(True) == 1, over
        assert len(acquired) < len(racing), over
        for lease in racing:
            lease.release()
        racing = [machine(f"next-{number}", store, tmp_path, leases) for number in range(8)]
        store.write(LEASE, [b'{"host": "dead"'])  # torn by a kill


def test_a_start_on_another_machine_is_refused_before_it_fetches(tmp_path, leases, monkeypatch):
    monkeypatch.setattr(lease_module, "EXPIRY_S", LONG_S)
    config = make_run(tmp_path / "a", 2, remote=f"file://{tmp_path}/remote")
    assert copy_all(config) == []
    holder = machine("alpha", remote_store(config), tmp_path, leases)
    holder.acquire()
    other = on_empty_disk(config, tmp_path / "b")
    with pytest.raises(UserError, match="is in use by alpha"):
        prepare(other)
    assert list(other.run_dir.glob("global_step_*")) == []
    holder.release()
    prepare(other)
    assert (step_dir(other.run_dir, 2) / "manifest.json").exists()
    with pytest.raises(UserError, match="is in use by"):
        machine("gamma", remote_store(config), tmp_path, leases).acquire()
    release_leases()
    machine("gamma", remote_store(config), tmp_path, leases).acquire()


def test_copies_end_when_another_machine_has_taken_over(tmp_path, leases, caplog):
    config = make_run(tmp_path / "a", 2, remote=f"file://{tmp_path}/remote")
    copies = remote_copies(config)
    copies.start()
    eventually(lambda: complete_steps(config) == [2])
    thief = machine("beta", remote_store(config), tmp_path, leases)
    remote_store(config).write(LEASE, [thief._text()])
    save(config, 4)
    copies.published(step_dir(config.run_dir, 4))
    eventually(lambda: "copies no more checkpoints there" in caplog.text)
    assert copies.finish(DEADLINE_S) == [4]
    assert complete_steps(config) == [2]
    thief.confirm()
