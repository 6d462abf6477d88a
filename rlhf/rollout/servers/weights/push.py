"""Pushes weights from the leader to all servers at once, bucket by bucket."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import xxhash
from safetensors.torch import save
from torch import Tensor

from rlhf.config import RolloutConfig
from rlhf.config.buffer_sizes import PUSH_BUCKET
from rlhf.rollout.servers.control import CallFailed, ServerControl, in_parallel
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.weights.nccl import NcclGroup
from rlhf.rollout.servers.weights.pull import WeightServer, address_towards
from rlhf.rollout.weight_digest import Digests, digest, read_digests

log = logging.getLogger(__name__)
Bucket = dict[str, Tensor]
UNFINISHED = "unfinished"
"""Label of a server's weights from the start of an update to its end."""


class Route(Protocol):
    """Sends buckets to servers that expect them."""

    device: torch.device  # device on which a bucket must be when it is sent

    def send(self, bucket: Bucket, urls: Sequence[str]) -> dict[str, str]:
        """Send the bucket to each of `urls`; return the errors of servers that did not load the bucket."""

    def close(self) -> None:
        """Release resources after the last bucket."""


@dataclass(frozen=True)
class Pushed:
    """Result of a push: the label of the weights, and for each URL None, or why the server lacks the weights."""

    label: str
    errors: dict[str, str | None]


class WeightPush:
    """Sends weights to servers by NCCL if leader and servers have NCCL; otherwise the servers download over HTTP."""

    def __init__(
        self, config: RolloutConfig, device: torch.device, secret: Secret, bucket_bytes: int = PUSH_BUCKET
    ) -> None:
        """
        Args:
            device: the leader's device, which has the weights.
            bucket_bytes: bytes gathered, cast and sent together; the push needs a few times this memory.
        """
        self._dtype: torch.dtype = getattr(torch, config.engine_dtype)
        self._secret, self._control = secret, ServerControl(secret, config.servers.answer_timeout_s)
        self._bucket_bytes = bucket_bytes
        self._nccl = NcclGroup(device, self._control) if device.type == "cuda" and find_spec("vllm") else None
        self._logged_route = ""
        self.sent_bytes = 0
        """Bytes of weights sent so far, to all servers together."""

    def send(self, urls: Sequence[str], tensors: Iterable[tuple[str, Tensor]], name: str) -> Pushed:
        """Send `tensors` to the servers at `urls`, which abort their requests and continue with the new weights.

        After any failure, this method iterates `tensors` to the end, because the other ranks take part in the
        iteration. Errors of `tensors` propagate. The servers store the label (`label_of`) as vLLM's weight version.

        A server with an error, such as digests that differ from the digests sent, does not generate until a later call
        succeeds. After an interrupted update, the server's label is `UNFINISHED`.
        """
        failed: dict[str, str] = {}
        left = iter(tensors)
        try:
            if self._nccl is not None:
                self._nccl.leave_restarted(urls)
            failed |= in_parallel(self._begin, urls)
            with ExitStack() as stack:
                route = self._route([url for url in urls if url not in failed])
                stack.callback(route.close)
                sent: dict[str, Tensor] = {}
                for bucket in buckets(left, self._dtype, route.device, self._bucket_bytes):
                    sent |= {name: digest(tensor, self._dtype) for name, tensor in bucket.items()}
                    receivers = [url for url in urls if url not in failed]
                    failed |= route.send(bucket, receivers)
                    self.sent_bytes += len(receivers) * sum(tensor.nbytes for tensor in bucket.values())
            digests = read_digests(sent)
            label = label_of(name, digests)
            about = {"digests": digests, "dtype": str(self._dtype).removeprefix("torch."), "label": name}
            failed |= in_parallel(lambda url: self._end(url, about, label), [url for url in urls if url not in failed])
            if self._nccl is not None:
                self._nccl.label = label
        finally:
            for _ in left:
                pass
        return Pushed(label, {url: failed.get(url) for url in urls})

    def label(self, tensors: Iterable[tuple[str, Tensor]], name: str) -> str:
        """Return the label that `send` would give to `tensors`."""
        return label_of(name, self._digests(tensors))

    def _digests(self, tensors: Iterable[tuple[str, Tensor]]) -> Digests:
        return read_digests({name: digest(tensor, self._dtype) for name, tensor in tensors})

    def adopt(self, urls: Sequence[str]) -> dict[str, str | None]:
        """Make servers serve the weights that they have. Return the errors as `Pushed.errors`.

        Abort the requests of an earlier trainer, and resume a server that was paused. The prefix cache stays.
        """

        def call(url: str) -> None:
            self._control.post(url, "/pause?mode=abort&clear_cache=false")
            self._control.post(url, "/resume")

        failed = in_parallel(call, urls)
        return {url: failed.get(url) for url in urls}

    def _begin(self, url: str) -> None:
        # Requests in progress use the old weights; the fleet repeats them.
        post = self._control.post
        post(url, "/pause?mode=abort")
        # If this trainer dies in the update, the next one must not believe that the server still has the old weights.
        post(url, "/update_weight_version", {"new_version": UNFINISHED})
        try:
            post(url, "/start_weight_update")
        except CallFailed:
            # An interrupted update is still open; an unreadable bucket makes the server abort it.
            with suppress(CallFailed):
                post(url, "/update_weights", {"update_info": {"broke": "off"}})
            post(url, "/start_weight_update")

    def _end(self, url: str, about: dict[str, Any], label: str) -> None:
        post = self._control.post
        # At the end the workers compare their weights with these digests.
        post(url, "/update_weights", {"update_info": about})
        post(url, "/finish_weight_update", {"weight_version": label})
        post(url, "/reset_prefix_cache")
        post(url, "/resume")

    def _route(self, urls: Sequence[str]) -> Route:
        nccl = self._nccl if self._nccl is not None and urls and self._nccl.join(urls) else None
        route, name = nccl or HttpRoute(urls, self._control, self._secret), "NCCL" if nccl else "HTTP"
        if urls and name != self._logged_route:
            log.info("Sending weights to the rollout servers over %s.", name)
            self._logged_route = name
        return route

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.leave()


class HttpRoute:
    """Lets servers download buckets from this machine."""

    device = torch.device("cpu")

    def __init__(self, urls: Sequence[str], control: ServerControl, secret: Secret) -> None:
        self._control = control
        self._address = {url: address_towards(url) for url in urls}
        addresses = set(self._address.values())
        self._servers = {address: WeightServer(address, control.timeout_s, secret.value) for address in addresses}

    def send(self, bucket: Bucket, urls: Sequence[str]) -> dict[str, str]:
        """Serve the bucket until each of `urls` has loaded it."""

        def fetch(url: str, address: dict[str, Any]) -> None:
            self._control.post(url, "/update_weights", {"update_info": address})

        return self.offer(save(bucket), urls, fetch) if urls else {}

    def offer(self, data: bytes, urls: Sequence[str], call: Callable[[str, dict[str, Any]], None]) -> dict[str, str]:
        """Serve `data` while `call` runs for each of `urls`. Return the errors of URLs whose call raised CallFailed.

        `call` receives the URL of a server, and the arguments of `pull.fetch` with which that server gets `data`.
        """
        about = {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data), "timeout_s": self._control.timeout_s}
        with ExitStack() as stack:
            at = {address: stack.enter_context(server.serve(data)) for address, server in self._servers.items()}
            return in_parallel(lambda url: call(url, {"url": at[self._address[url]], **about}), urls)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


def label_of(name: str, digests: Digests) -> str:
    """Return `name` with a hash of the digests, so that weights with the same label have the same bits."""
    return f"{name}.{xxhash.xxh3_128_hexdigest(json.dumps(sorted(digests.items())).encode())}"


def buckets(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device, limit: int
) -> Iterator[Bucket]:
    """Yield copies of `tensors` on `device`, floating-point tensors in `dtype`, in groups of at most `limit` bytes.

    A larger tensor is a group of its own.
    """
    bucket: Bucket = {}
    size = 0
    for name, tensor in tensors:
        to = dtype if tensor.is_floating_point() else tensor.dtype
        if bucket and size + tensor.numel() * to.itemsize > limit:
            yield bucket
            bucket, size = {}, 0
        # Always copy: the trainer may free a gathered tensor when it gathers the next.
        bucket[name] = tensor.detach().to(device, to, copy=True).contiguous()
        size += tensor.numel() * to.itemsize
    if bucket:
        yield bucket
