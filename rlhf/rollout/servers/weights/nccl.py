"""Sends weights over NCCL: each bucket is one broadcast from the leader's GPU to the servers' vLLM workers."""

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

# Larger than any bucket, so that both ends treat a bucket as one chunk.
_ONE_CHUNK = 1 << 40
# Seconds that the broadcast may still run after a server's error: the server may have received all bytes.
_GRACE_S = 5.0

log = logging.getLogger(__name__)


class NcclGroup:
    """NCCL group of the leader (rank 0) and all servers' workers. The leader, too, needs vLLM and a CUDA device."""

    def __init__(self, device: torch.device, control: ServerControl) -> None:
        self.device = device
        self._control = control
        self._urls: list[str] = []
        self._communicator: Any = None
        self.label = ""  # the servers' `weight_version` after the last update

    def join(self, urls: Sequence[str]) -> bool:
        """Join a group with exactly these servers. Return False on failure.

        After a failure, a later call with the same servers returns False without another try.
        """
        if list(urls) != self._urls:
            self.leave()
            self._communicator = self._rendezvous(urls)
            self._urls = list(urls)
        return self._communicator is not None

    def leave_restarted(self, urls: Sequence[str]) -> None:
        """Leave the group if a server lacks the label of the last update, as after a restart at its old address.

        The next `join` then makes a new group. Call this before an update changes the labels.
        """
        if self._communicator is not None:
            try:
                known = {self._control.get(url, "/weight_info")["weight_version"] for url in urls}
            except CallFailed:
                known = set()
            if known != {self.label}:
                self.leave()

    def _rendezvous(self, urls: Sequence[str]) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        try:
            sizes = [self._control.get(url, "/get_world_size")["world_size"] for url in urls]
        except CallFailed as error:
            log.warning("No NCCL group with the rollout servers: %s", error)
            return None
        # Use one address for all servers: an address that other machines reach also works on this machine.
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

        communicator, errors = self._with_servers(partial(trainer_init, rendezvous), invite, urls)
        if communicator is None or errors or not communicator.available:
            log.warning("No NCCL group with the rollout servers: %s", errors or "the rendezvous failed")
            return None
        return communicator

    def send(self, bucket: dict[str, Tensor], urls: Sequence[str]) -> dict[str, str]:
        """Broadcast the bucket; return errors by URL. An interrupted broadcast fails for all URLs: workers may hang."""
        if not urls:
            return {}
        if self._communicator is None and not self.join(urls):  # a server dropped out during the last bucket
            return dict.fromkeys(urls, "no NCCL group could be formed after another server dropped out")
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

        torch.cuda.current_stream(self.device).synchronize()  # vLLM's producer packs on a stream of its own
        sent, errors = self._with_servers(broadcast, receive, urls)
        if not sent or errors:
            self.leave()
        return errors if sent else {url: errors.get(url, "the NCCL broadcast was cut off") for url in urls}

    def _with_servers(
        self, ours: Callable[[], Any], theirs: Callable[[str], None], urls: Sequence[str]
    ) -> tuple[Any, dict[str, str]]:
        """Run `ours` while `theirs` calls each server. Return the result of `ours`, and the servers' errors.

        The result is None if `ours` failed or was interrupted. `ours` runs in a thread that can be abandoned, because
        NCCL may hang if a peer is missing.
        """
        results: list[Any] = []
        ended, failed = threading.Event(), threading.Event()

        def run() -> None:
            try:
                torch.cuda.set_device(self.device)  # threads start with device 0
                results.append(ours())
            except Exception:
                log.exception("NCCL failed.")
            ended.set()

        def step(url: str) -> None:
            try:
                theirs(url)
            except CallFailed:
                failed.set()
                raise

        with ThreadPoolExecutor(1, "nccl") as pool:
            errors = pool.submit(in_parallel, step, urls)
            threading.Thread(target=run, daemon=True).start()
            deadline = time.monotonic() + self._control.timeout_s
            while not ended.wait(0.002):
                if failed.is_set():
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                    failed.clear()
                if time.monotonic() > deadline:
                    self.leave()  # ends the broadcast on the leader
                    break
            return (results[0] if results else None), errors.result()

    def close(self) -> None:
        """Do nothing: the group stays for the next update."""

    def leave(self) -> None:
        communicator, self._communicator, self._urls = self._communicator, None, []
        if communicator is not None:
            communicator.destroy()
