"""Weights by NCCL: each bucket is one broadcast from the leader's GPU to the servers' workers, which vLLM receives."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf.rollout.servers.control import CallFailed, ServerControl, in_parallel
from rlhf.rollout.servers.weights.pull import address_towards

# Larger than any bucket: both ends then see each bucket as one chunk.
_ONE_CHUNK = 1 << 40
# A server that refuses what it has received by then does not keep the broadcast from ending.
_GRACE_S = 5.0

log = logging.getLogger(__name__)


class NcclGroup:
    """The leader as rank 0 and, after it, all workers of all servers. The leader needs vLLM and a CUDA device, too."""

    def __init__(self, device: torch.device, control: ServerControl) -> None:
        self.device = device
        self._control = control
        self._urls: list[str] = []
        self._communicator: Any = None
        self.label = ""
        """What the servers call the weights of the last update."""

    def join(self, urls: Sequence[str]) -> bool:
        """Be in a group with just these servers; False where that cannot be had. Tried once for the same servers.

        A server that was started anew at its old address does not know the label of the last update, and so is noticed.
        """
        if self._communicator is not None:
            try:
                known = {self._control.get(url, "/weight_info")["weight_version"] for url in urls}
            except CallFailed:
                known = set()
            if known != {self.label}:
                self.leave()
        if list(urls) != self._urls:
            self.leave()
            self._communicator = self._rendezvous(urls)
            self._urls = list(urls)
        return self._communicator is not None

    def _rendezvous(self, urls: Sequence[str]) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        try:
            sizes = [self._control.get(url, "/get_world_size")["world_size"] for url in urls]
        except CallFailed as error:
            log.warning("No NCCL group with the rollout servers: %s", error)
            return None
        # One address for all of them: that of another machine's, if there is one, is good for this one, too.
        address = max((address_towards(url) for url in urls), key=lambda found: not found.startswith("127."))
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        rendezvous = {"master_address": address, "master_port": port, "world_size": 1 + sum(sizes)}
        packing = {"packed": True, "packed_buffer_size_bytes": _ONE_CHUNK, "packed_num_buffers": 1}
        offsets = {url: 1 + sum(sizes[:i]) for i, url in enumerate(urls)}

        def invite(url: str) -> None:
            init_info = {**rendezvous, **packing, "rank_offset": offsets[url]}
            self._control.post(url, "/init_weight_transfer_engine", {"init_info": init_info})

        communicator, refusals = self._with_servers(partial(trainer_init, rendezvous), invite, urls)
        if communicator is None or refusals or not communicator.available:
            log.warning("No NCCL group with the rollout servers: %s", refusals or "it did not come about")
            return None
        return communicator

    def send(self, bucket: dict[str, Tensor], urls: Sequence[str]) -> dict[str, str]:
        """Broadcast the bucket. One that is cut off is lost for all servers: their workers may wait in it for ever."""
        if not urls:
            return {}
        if self._communicator is None and not self.join(urls):  # a server dropped out with the last bucket
            return dict.fromkeys(urls, "no NCCL group without the server that dropped out")
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        update = {
            "names": list(bucket),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
            "shapes": [list(tensor.shape) for tensor in bucket.values()],
        }

        def broadcast() -> bool:
            packed_nccl_broadcast_producer(
                iter(bucket.items()),
                self._communicator,
                0,
                lambda item: item[1],
                buffer_size_bytes=_ONE_CHUNK,
                num_buffers=1,
            )
            return True

        def receive(url: str) -> None:
            self._control.post(url, "/update_weights", {"update_info": update})

        torch.cuda.current_stream(self.device).synchronize()  # it packs on a stream of its own
        sent, refusals = self._with_servers(broadcast, receive, urls)
        if not sent or refusals:
            self.leave()
        return refusals if sent else {url: refusals.get(url, "the NCCL broadcast was cut off") for url in urls}

    def _with_servers(
        self, ours: Callable[[], Any], theirs: Callable[[str], None], urls: Sequence[str]
    ) -> tuple[Any, dict[str, str]]:
        """Do `ours` while each server does `theirs`; its result, None if it failed or was cut off, and the refusals.

        `ours` may hang in NCCL where a peer is missing, and runs in a thread that can be left behind.
        """
        results: list[Any] = []
        ended, refused = threading.Event(), threading.Event()

        def run() -> None:
            try:
                torch.cuda.set_device(self.device)  # a thread starts with device 0
                results.append(ours())
            except Exception:
                log.exception("NCCL failed.")
            ended.set()

        def step(url: str) -> None:
            try:
                theirs(url)
            except CallFailed:
                refused.set()
                raise

        with ThreadPoolExecutor(1, "nccl") as pool:
            refusals = pool.submit(in_parallel, step, urls)
            threading.Thread(target=run, daemon=True).start()
            deadline = time.monotonic() + self._control.timeout_s
            while not ended.wait(0.002):
                if refused.is_set():
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                    refused.clear()
                if time.monotonic() > deadline:
                    self.leave()  # which ends the broadcast at this end
                    break
            return (results[0] if results else None), refusals.result()

    def close(self) -> None:
        """The group stays for the next update."""

    def leave(self) -> None:
        """Give up the group, whatever state it is in."""
        communicator, self._communicator, self._urls = self._communicator, None, []
        if communicator is not None:
            communicator.destroy()
