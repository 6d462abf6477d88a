"""Controls the rollout servers on the leader: a thread monitors the servers and sends requests."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rlhf.rollout.servers.fleet_loop import FleetLoop, FleetState

log = logging.getLogger(__name__)
T = TypeVar("T")
CLOSE_S = 60.0
CHECK_S = 5.0  # interval in seconds between checks that the thread is alive


class Fleet:
    """Controls the servers on the leader: runs a `FleetLoop` in a thread."""

    def __init__(self, fleet_loop: FleetLoop) -> None:
        self._fleet_loop = fleet_loop
        self._began = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="rollout servers", daemon=True)
        self._thread.start()
        self._began.wait()

    def wait(self, seconds: float, *, generating: bool = True) -> FleetState | None:
        """Wait for a state of the fleet and return the state; return None after `seconds`.

        With `generating`, the states are `done` (all samples or the quotas are complete, or the generation has stopped)
        and `weights` (a server can receive the wanted weights). Without `generating`, the only state is `ready`: a
        server is alive.

        Raises:
            ServersFailed: too many failures; the text has each server's last failures and log file.
            UserError: a server must be started differently (`Admission.check`), or rejects a request.
        """
        return self._call(self._fleet_loop.until(seconds, generating=generating))

    def do(self, action: Callable[[FleetLoop], T]) -> T:

        async def run() -> T:
            return action(self._fleet_loop)

        return self._call(run())

    def close(self) -> None:
        self._fleet_loop.closing = True
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("The thread of the rollout servers did not end within %g s.", CLOSE_S)

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        fleet_loop = self._fleet_loop
        if fleet_loop.error is None and self._loop is not None and self._thread.is_alive():
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
            while self._thread.is_alive() and not future.done():
                concurrent.futures.wait([future], CHECK_S)
            if future.done() and not future.cancelled():
                return future.result()
            self._thread.join(CLOSE_S)
        else:
            call.close()
        raise fleet_loop.error or RuntimeError("the rollout servers are closed")

    def _run(self) -> None:
        def began() -> None:
            self._loop = asyncio.get_running_loop()
            self._began.set()

        try:
            asyncio.run(self._fleet_loop.run(began))
        except BaseException as error:  # `_call` raises the error in the leader's thread
            self._fleet_loop.error = error
        finally:
            self._began.set()
