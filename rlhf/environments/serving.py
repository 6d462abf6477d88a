"""Runs in a process of environments: serves one environment object over a socket, one JSON line per call."""

import asyncio
import inspect
import json
import math
import os
import random
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from socket import socket
from typing import Any, Protocol

from rlhf import typed_json
from rlhf.environments.definition import Definition
from rlhf.environments.saved_state import restore, saved
from rlhf.reward.namespaces import written_shared_memory

_LONGEST = 20_000
"""Maximum number of characters of an error in a reply."""


class Server(Protocol):
    """Serves one environment."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make one call and return its reply."""

    def close(self) -> None:
        """Close the environment."""


class Served:
    """One environment object, made by the request `open`."""

    def __init__(
        self,
        makers: Sequence[Callable[[], Any]],
        definitions: Sequence[Definition],
        *,
        alone: bool,
        imported_files: frozenset[tuple[str, int, int, int]],
    ) -> None:
        """
        Args:
            makers: make an object of each class.
            alone: the process serves no other object, so the global generators may be seeded.
            imported_files: `written_files` after the import of the classes.
        """
        self._makers, self._definitions, self._alone = makers, definitions, alone
        self._imported_files = imported_files
        self._environment: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make one call. Return `value` and `state`, or `error` after an exception.

        If a tool raised ValueError, return `rejected` and `state`.
        """
        try:
            try:
                reply = {"value": getattr(self, f"_{request['op']}")(request)}
            except ValueError as error:
                if request["op"] != "tool":
                    raise
                reply = {"rejected": str(error)[-_LONGEST:] or "invalid call"}
            # Before `reset`, an object may lack the attributes that its `state_dict` reads.
            return reply | {"state": None if request["op"] == "open" else self._state()}
        except BaseException as error:
            return _failure(error)

    def _state(self) -> dict[str, Any] | None:
        # With `env.process=episode`, global generators and modules are state that the attributes lack. If an object has
        # written a file, its attribute is only the path, and a kill may remove the file.
        by_attributes = not self._alone and not hasattr(self._environment, "state_dict")
        return saved(self._environment, attributes=by_attributes and written_files() == self._imported_files)

    def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None and hasattr(environment, "close"):
            _finished(environment.close())

    def _open(self, request: dict[str, Any]) -> None:
        self._definition = self._definitions[request["kind"]]
        if self._alone:
            seed_generators(request["seed"])
        self._environment = self._makers[request["kind"]]()
        if (state := request["state"]) is not None:
            restore(self._environment, state)

    def _reset(self, request: dict[str, Any]) -> str | None:
        reset = self._environment.reset
        parameters = inspect.signature(reset).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        text = _finished(reset(**{name: v for name, v in request["row"].items() if takes_all or name in named}))
        return None if text is None else _text("reset", text)

    def _tool(self, request: dict[str, Any]) -> str:
        value = _finished(getattr(self._environment, request["name"])(**request["arguments"]))
        return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)

    def _step(self, request: dict[str, Any]) -> list[Any]:
        assert self._definition.step is not None
        value = _finished(getattr(self._environment, self._definition.step)(request["text"]))
        text, reward = value if isinstance(value, tuple) and len(value) == 2 else (value, 0.0)
        return [None if text is None else _text(self._definition.step, text), _number(self._definition.step, reward)]

    def _reward(self, request: dict[str, Any]) -> float:
        return _number("get_reward", _finished(self._environment.get_reward())) if self._definition.rewards else 0.0


def written_files() -> frozenset[tuple[str, int, int, int]]:
    """Return path, inode number, and for files size and modification time, of what environments have written.

    All environment processes of a rank share the folder of temporary files. Writes to /dev/shm are in an overlay's
    folder. Without an overlay, they are not found, because other programs of the user write to /dev/shm, too.
    """
    found = set()
    for root in (tempfile.gettempdir(), written_shared_memory(tempfile.gettempdir())):
        for folder, folders, names in os.walk(root):
            for name in (*folders, *names):
                with suppress(OSError):  # another environment may have removed the file
                    status = os.lstat(path := os.path.join(folder, name))  # noqa: PTH118
                    content = (0, 0) if name in folders else (status.st_size, status.st_mtime_ns)
                    found.add((path, status.st_ino, *content))
    return frozenset(found)


def serve(channel: socket, served: Server) -> None:
    """Answer the requests of `channel` until it is closed, then close the environment."""
    with channel, channel.makefile("rb") as requests:
        try:
            for line in requests:
                request = typed_json.loads(line)
                if request["op"] == "close":
                    reply = _closed(served)
                else:
                    reply = served.answer(request)
                channel.sendall(json.dumps(reply | {"number": request["number"]}).encode() + b"\n")
        except (ConnectionError, ValueError):
            return  # the trainer has closed the channel in the middle of a call
        finally:
            _closed(served)


def _closed(served: Server) -> dict[str, Any]:
    try:
        served.close()
    except BaseException as error:
        return _failure(error)
    return {"value": None, "state": None}


def _finished(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value

    async def awaited() -> Any:
        return await value

    # One loop for all objects of the process: an async client works only in the loop in which it was opened.
    return asyncio.run_coroutine_threadsafe(awaited(), _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python and, if it is imported, of NumPy."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % (1 << 32))


def _text(method: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{method} returned {type(value).__name__}; return a text or None")
    return value


def _number(method: str, value: Any) -> float:
    value = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{method} returned the reward {value!r}; return a finite number")
    return float(value)


def _failure(error: BaseException) -> dict[str, Any]:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == __name__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__)).rstrip()
    return {"error": text[-_LONGEST:]}
