"""Runs a TCP proxy before a server, so that tests can break connections."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

GARBAGE = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"choices": 7'
DEADLINE_S = 120.0


class Proxy:
    """Listens at `url` and forwards to `upstream`. `arm` schedules an action such as `drop`, `babble` or `hang`."""

    def __init__(self) -> None:
        self.upstream = ""
        self.requests = 0
        """Requests for samples since `arm`."""
        self._babbles = False
        self._at, self._action = 0, lambda: None
        self._tasks: set[asyncio.Task] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True).start()
        self._open = self._do(self._event())
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def arm(self, at: int, action: Callable[[], None]) -> None:
        """Call `action` at request number `at` for samples, before forwarding the request."""
        self.requests, self._at, self._action = 0, at, action

    def drop(self) -> None:
        """Break all connections."""
        for task in self._tasks:
            task.cancel()

    def babble(self) -> None:
        """Answer the present request with garbage."""
        self._babbles = True

    def hang(self) -> None:
        """Accept connections but send nothing until `resume`."""
        self._open.clear()

    def resume(self) -> None:
        """Forward again."""
        self._loop.call_soon_threadsafe(self._open.set)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    async def _event(self) -> asyncio.Event:
        event = asyncio.Event()
        event.set()
        return event

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST /inference"):
                self.requests += 1
                if self.requests == self._at:
                    self._action()
                if self._babbles:
                    self._babbles = False
                    writer.write(GARBAGE)
                    await writer.drain()
                    return
            await self._open.wait()
            target = urlsplit(self.upstream)
            from_server, to_server = await asyncio.open_connection(target.hostname, target.port)
            to_server.write(head)
            try:
                await asyncio.wait(
                    [
                        asyncio.ensure_future(self._pump(reader, to_server)),
                        asyncio.ensure_future(self._pump(from_server, writer)),
                    ],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                to_server.transport.abort()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
