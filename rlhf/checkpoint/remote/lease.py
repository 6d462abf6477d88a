"""Leases a run's remote folder to one machine at a time, because two machines would overwrite each other's copies.

The leaseholder rewrites the object `lease.json` every RENEW_S seconds. Other machines watch the object: a lease that
changes belongs to a living run, and a lease unchanged for EXPIRY_S seconds has expired. So no machine compares its
clock with another machine's clock. If two machines take over an expired lease at the same time, the last writer gets
the lease. The other machine notices when it reads the lease SETTLE_S seconds after its own write or, if the last write
came later, at its next renewal.
"""

import json
import logging
import os
import platform
import threading
import time
import uuid
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.checkpoint.remote.remote_store import RemoteStore
from rlhf.checkpoint.remote.retries import Retries, Stopped, one_line, silence_as_warning
from rlhf.errors import UserError
from rlhf.ranks.parent import SUPERVISOR_PID, machine

log = logging.getLogger(__name__)
LEASE = "lease.json"
RENEW_S, EXPIRY_S = 20.0, 90.0
POLL_S = 2.0
SETTLE_S = 2.0
"""Seconds between the takeover of an expired lease and the check that no other machine has taken it over, too."""
READS, READ_AGAIN_S = 6, 0.1
"""Number of reads of an incomplete lease, and seconds between reads: in a `file://` remote, a reader can see a lease
that is only partly written."""
STALLED_S = 30.0
RELEASE_S = 1.0
"""Seconds to wait for a silent remote when releasing the lease."""


class Lease:
    """Leases the folder of `store` for the run directory `run_dir` on this machine. All processes of a run share the
    lease, since a lock protects the run directory. `retries` repeats network calls."""

    def __init__(self, store: RemoteStore, run_dir: Path, retries: Retries) -> None:
        self._store, self._retries = store, retries
        self._lost: str | None = None
        self._stop, self._writing = threading.Event(), threading.Lock()
        self._renewals = Retries(f"{store.url}/{LEASE}", stalled_s=STALLED_S)
        status = run_dir.stat()
        self._me = {
            "host": platform.node(),
            "run_dir": str(run_dir.absolute()),
            "directory": f"{status.st_dev}:{status.st_ino}",
            "machine": machine(),
        }

    def acquire(self) -> None:
        """Acquire the lease, and renew it in a thread from now on. Wait up to EXPIRY_S seconds until another machine's
        lease expires; raise UserError with the leaseholder's name if that machine renews its lease."""
        create = partial(self._store.create, LEASE, self._text())
        if self._read() is not None or not self._retries.call("writing the lease", create):
            seen = self._read()
            if seen is not None and not self._is_own(seen):
                self._wait_for_expiry(seen)
            self._take_over(seen)
        threading.Thread(target=self._keep, name="remote-lease", daemon=True).start()

    def check(self) -> None:
        """Raise UserError if `confirm` or a renewal has found another machine's lease."""
        if self._lost is not None:
            raise UserError(self._lost)

    def confirm(self) -> None:
        """Read the lease, and rewrite it if it is missing or incomplete. Raise UserError for another machine's lease.

        Call this before anything remote is written or removed.
        """
        seen = self._read()
        if not _parsed(seen):
            self._take_over(seen)
        elif not self._is_own(seen):
            self._lost = _in_use(self._store, seen)
        self.check()

    def release(self) -> None:
        """Remove this run's lease, so that other machines need not wait. Log a remote that does not answer."""
        self._stop.set()
        self._renewals.stop()

        def remove() -> None:
            with self._writing:  # a renewal in progress would recreate the lease
                if self._is_own(self._read_once()):
                    self._store.remove_object(LEASE)

        try:
            Retries(self._store.url, stalled_s=RELEASE_S, give_up_s=0.0).call("releasing the lease", remove)
        except Exception as error:
            log.info("%s/%s could not be removed (%s); it expires by itself.", self._store.url, LEASE, one_line(error))

    def _keep(self) -> None:
        try:
            while not self._stop.wait(RENEW_S):
                self._renewals.call("renewing", self._renew)
                if self._lost is not None:
                    log.error("%s", self._lost)
                    return
        except Stopped:
            pass

    def _renew(self) -> None:
        with self._writing:
            seen = self._read_once()
            if _parsed(seen) and not self._is_own(seen):
                self._lost = _in_use(self._store, seen)
            elif not self._stop.is_set():
                self._store.write(LEASE, [self._text()])

    def _wait_for_expiry(self, seen: bytes) -> None:
        holder, started = _parsed(seen), time.monotonic()
        if holder.get("machine") == self._me["machine"] and not _is_alive(holder.get("pid")):
            return
        log.warning(
            "%s is leased to %s. Waiting %g s: if that machine does not renew the lease, this start takes over.",
            self._store.url,
            _name(holder),
            EXPIRY_S,
        )
        while time.monotonic() - started < EXPIRY_S:
            time.sleep(POLL_S)
            now = self._read()
            if now is None:
                return
            if now != seen:
                raise UserError(_in_use(self._store, now))
        log.warning("%s did not renew its lease for %g s: the lease has expired.", _name(holder), EXPIRY_S)

    def _take_over(self, expired: bytes | None) -> None:
        """Replace the lease `expired` by this run's lease. Raise UserError if another machine is faster."""
        before = self._read()
        renews = self._is_own(before)
        if before in (None, expired) or renews:
            self._retries.call("writing the lease", lambda: self._store.write(LEASE, [self._text()]))
            if not renews:
                time.sleep(SETTLE_S)
        seen = self._read()
        if not self._is_own(seen):
            raise UserError(_in_use(self._store, seen))

    def _read(self) -> bytes | None:
        return self._retries.call("reading the lease", self._read_once)

    def _read_once(self) -> bytes | None:
        """Return the lease, or None without a lease. A lease that is incomplete after `READS` reads is returned as it
        is: its writer was probably killed."""
        for attempt in range(READS):
            if attempt:
                time.sleep(READ_AGAIN_S)
            seen = self._store.read(LEASE)
            if seen is None or _parsed(seen):
                break
        return seen

    def _is_own(self, seen: bytes | None) -> bool:
        return all(_parsed(seen).get(key) == self._me[key] for key in ("host", "directory", "machine"))

    def _text(self) -> bytes:
        renewed = datetime.now(UTC).isoformat(timespec="seconds")
        pid = int(os.environ.get(SUPERVISOR_PID, os.getpid()))
        return json.dumps(self._me | {"pid": pid, "renewed": renewed, "beat": uuid.uuid4().hex}).encode()


_leases: list[Lease] = []


def acquire_lease(store: RemoteStore, run_dir: Path) -> None:
    """Acquire the lease for this process, until `release_leases`. If the remote does not answer, only log a warning:
    `RemoteCopies` acquires the lease again."""
    lease = Lease(store, run_dir, Retries(store.url, stalled_s=STALLED_S, give_up_s=STALLED_S))
    with silence_as_warning(store.url):
        lease.acquire()
        _leases.append(lease)


def release_leases() -> None:
    while _leases:
        _leases.pop().release()


def _is_alive(pid: object) -> bool:
    return isinstance(pid, int) and Path(f"/proc/{pid}").exists()


def _parsed(seen: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(seen or b"")
    except ValueError:  # a kill cut the lease short, so its holder is unknown
        return {}
    return found if isinstance(found, dict) else {}


def _name(holder: dict[str, Any]) -> str:
    return f"{holder.get('host', 'an unknown host')} ({holder.get('run_dir', '?')}, process {holder.get('pid', '?')})"


def _in_use(store: RemoteStore, seen: bytes | None) -> str:
    return (
        f"checkpoint.remote: {store.url} is in use by {_name(_parsed(seen))}; two runs would overwrite each other's "
        "copies. Stop that run, or set another trainer.experiment_name or checkpoint.remote. A dead machine's "
        f"lease expires {EXPIRY_S:g} s after its last renewal; you may also delete {LEASE}."
    )
