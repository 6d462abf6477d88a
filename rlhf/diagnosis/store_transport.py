"""Exchanges small objects between ranks through the launcher's key-value store, and names ranks that do not answer.

The checks between nodes use this transport instead of gloo or NCCL, because they test gloo and NCCL.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from rlhf.errors import UserError
from rlhf.ranks.object_codec import decode, encode
from rlhf.ranks.transport import LostPeer, Transport
from rlhf.ranks.world import STORE_FD

_AGENT_STORE, _RESTART = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"
_SPARE_S = 5.0
"""Other ranks wait this many seconds longer than rank 0, which names the missing ranks."""


def open_store(deadline_s: float) -> dist.Store:
    """Return the store of the ranks of this launch. Rank 0 serves the store, or torchrun does.

    Raises:
        UserError: the store cannot be reached within `deadline_s` seconds.
    """
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    serves = rank == 0 and os.environ.get(_AGENT_STORE) != "True"
    fd = os.environ.pop(STORE_FD, None)
    try:
        store = dist.TCPStore(
            host,
            port,
            int(os.environ["WORLD_SIZE"]),
            is_master=serves,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
            master_listen_fd=None if fd is None else int(fd),
        )
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"Rank {rank} cannot reach the store of rank 0 at {host}:{port} within {deadline_s:g} s ({first}). Start "
            "the command on every node, and check MASTER_ADDR, MASTER_PORT and the firewall."
        ) from error
    return dist.PrefixStore(prefix(), store)


def prefix() -> str:
    """Return a key prefix that is unique to this start of the ranks, because torchrun keeps the store on restarts."""
    return f"doctor/{os.environ.get(_RESTART, '0')}"


class StoreTransport(Transport):
    """Exchanges objects of all ranks through `store`. Each call may take `deadline_s` seconds.

    If a rank does not answer, the call raises LostPeer on every rank, with the numbers of all such ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, deadline_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._deadline_s, self._calls = store, deadline_s, count()

    def all_gather(self, value: Any) -> list[Any]:
        # Rank 0 reads all values and writes them under one key: each rank makes two calls, not one for each rank.
        return self._exchange(value, lambda values: values)

    def gather(self, value: Any, to: int) -> list[Any] | None:
        if to != 0:
            raise ValueError("only rank 0 gathers")
        values: list[list[Any]] = []
        self._exchange(value, values.append)
        return values[0] if values else None

    def _exchange(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """Send `value` to rank 0, which calls `answer` with all values. Return the result of `answer` on every rank."""
        call = next(self._calls)
        if self.rank != 0:
            self._write(f"{call}/{self.rank}", value)
            found = self._read(f"{call}/answer", self._deadline_s + _SPARE_S, [0])
        else:
            found = self._collected(call, value, answer)
            self._write(f"{call}/answer", found)
        if "missing" in found:
            raise _lost(found["missing"], self._deadline_s)
        return found["answer"]

    def _collected(self, call: int, own: Any, answer: Callable[[list[Any]], Any]) -> dict[str, Any]:
        end = time.monotonic() + self._deadline_s
        values, missing = [own], []
        for rank in range(1, self.world_size):
            try:
                values.append(self._read(f"{call}/{rank}", max(0.01, end - time.monotonic()), [rank]))
            except LostPeer:
                missing.append(rank)
        return {"missing": missing} if missing else {"answer": answer(values)}

    def _write(self, key: str, value: Any) -> None:
        self._store.set(key, encode(value).hex())

    def _read(self, key: str, seconds: float, ranks: Sequence[int]) -> Any:
        """Wait for `key` and return its value. Raise LostPeer for `ranks` after `seconds` seconds."""
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            return decode(bytes.fromhex(self._store.get(key).decode()))
        except RuntimeError as error:
            raise _lost(ranks, seconds) from error

    def broadcast(self, value: Any, source: int) -> Any:
        return self.all_gather(value if self.rank == source else None)[source]

    def leave(self, seconds: float) -> None:
        """On rank 0, which may serve the store, wait up to `seconds` until every rank has called this method."""
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            try:
                self._store.wait([f"left/{rank}" for rank in range(self.world_size)], timedelta(seconds=seconds))
            except RuntimeError:  # a lost rank has been reported already
                return


def _lost(ranks: Sequence[int], seconds: float) -> LostPeer:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return LostPeer(f"{who} did not answer within {seconds:g} s")
