"""Pushes adapters from the leader to servers that have their base."""

import re
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from typing import Any

import torch
from torch import Tensor

from rlhf.config import LoraConfig, RolloutConfig
from rlhf.errors import UserError
from rlhf.rollout.servers.control import CallFailed
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.weights.adapter_message import AdapterMessage, address
from rlhf.rollout.servers.weights.push import UNFINISHED, HttpRoute, WeightPush, label_of
from rlhf.rollout.vllm.adapter_tensors import adapter_digests, adapter_settings, copies
from rlhf.rollout.weight_digest import Digests, read_digests

_MISTAKE = re.compile(r"rollout\.lora=native: .*?rollout\.lora=merged\.")
"""A user's mistake in a server's answer."""


class AdapterPush(WeightPush):
    """A `WeightPush` that sends a base to each server once, and then only adapters, always over HTTP.

    The label of adapters names their base, too. The servers know adapters by their label, so a request with another
    label fails.
    """

    def __init__(self, config: RolloutConfig, device: torch.device, secret: Secret, *, lora: LoraConfig) -> None:
        super().__init__(config, device, secret)
        self._lora = lora
        self._base: Digests = {}
        self._base_label = ""
        self._message: AdapterMessage | None = None

    def read_base(self, tensors: Iterable[tuple[str, Tensor]], run_id: str) -> str:
        """Compute the digests of the base. Return its label, as `send` computes it for the name `base_name(run_id)`."""
        self._base = self._digests(tensors)
        self._base_label = label_of(base_name(run_id), self._base)
        return self._base_label

    def read_adapters(self, tensors: Iterable[tuple[str, Tensor]], name: str) -> str:
        """Copy the adapters that `send_adapters` sends, and return their label."""
        adapters = copies(tensors, self._dtype)
        digests = {**self._base, **read_digests(adapter_digests(adapters, self._lora, self._dtype))}
        label = label_of(f"{name}.{hash_in(self._base_label)}", digests)
        dtype = str(self._dtype).removeprefix("torch.")
        self._message = AdapterMessage(adapters, adapter_settings(self._lora), digests, dtype, label)
        return label

    def send_adapters(self, labels: Mapping[str, str]) -> dict[str, str | None]:
        """Make servers that have the base abort their requests, and continue with the adapters of `read_adapters`.

        Args:
            labels: the last known label of each server, by URL.

        Return the errors as `Pushed.errors`. The label of a server that rejects the adapters is then `UNFINISHED`, so
        that the next push sends the base again, in case the server's base is damaged.

        Raises:
            UserError: no push can succeed, for example because vLLM serves no adapters for a weight.
        """
        message, urls = self._message, list(labels)
        assert message is not None
        if not urls:
            return {}
        data = message.encode()

        def load(url: str, about: dict[str, Any]) -> None:
            self._load(url, labels[url], message.label, address(**about))

        with closing(HttpRoute(urls, self._control, self._secret)) as route:
            failed = route.offer(data, urls, load)
        for url, reason in failed.items():
            if mistake := _MISTAKE.search(reason):
                raise UserError(f"{mistake[0]} (rollout server {url})")
        self.sent_bytes += len(urls) * len(data)
        if self._nccl is not None:
            self._nccl.label = message.label
        return {url: failed.get(url) for url in urls}

    def _load(self, url: str, old: str, new: str, path: str) -> None:
        post = self._control.post
        post(url, "/pause?mode=abort")
        # If this trainer dies now, the next trainer must not believe that the server still has the old adapters.
        post(url, "/update_weight_version", {"new_version": self._base_label})
        for label in {new, old if has_base(old, self._base_label) else new}:
            with suppress(CallFailed):  # most often the server does not know the label
                post(url, "/v1/unload_lora_adapter", {"lora_name": label})
        try:
            # The worker compares the base and the adapters with the digests in the message.
            post(url, "/v1/load_lora_adapter", {"lora_name": new, "lora_path": path})
        except CallFailed:
            with suppress(CallFailed):
                post(url, "/update_weight_version", {"new_version": UNFINISHED})
            raise
        post(url, "/update_weight_version", {"new_version": new})
        post(url, "/reset_prefix_cache")
        post(url, "/resume")


def base_name(run_id: str) -> str:
    """Return the name of a run's base for `WeightPush.send`."""
    return f"{run_id}.base"


def hash_in(label: str) -> str:
    """Return the hash in a label of `label_of`."""
    return label.rpartition(".")[2]


def has_base(label: str, base_label: str) -> bool:
    """Return whether a server with this label has the base, with adapters or alone."""
    return hash_in(base_label) in label.split(".")
