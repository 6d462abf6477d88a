"""Receives and verifies weights and adapters from HTTP or NCCL in a worker of a vLLM server."""

import os
from typing import Any

import torch
from safetensors.torch import load
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlhf.errors import UserError
from rlhf.ranks.gloo import gather_bytes
from rlhf.ranks.object_codec import decode, encode
from rlhf.rollout.servers.secret import environment_secret
from rlhf.rollout.servers.weights.adapter_message import AdapterMessage, parse_address
from rlhf.rollout.servers.weights.pull import fetch
from rlhf.rollout.servers.weights.vllm_adapters import download_adapters
from rlhf.rollout.vllm.adapter_tensors import is_factor, replace_adapters
from rlhf.rollout.vllm.model_digests import model_digests, record_packing, weight_check
from rlhf.rollout.vllm.repacking import repack
from rlhf.rollout.weight_digest import Digest, WeightCheck


class ReceivingEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine, which also downloads buckets from a URL and recovers from an interrupted update."""

    _check: WeightCheck | None = None  # checks weights without adapters
    _check_adapted: WeightCheck | None = None  # checks a base with adapters
    _sent: dict[str, Any] | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if (manager := getattr(self.model, "lora_manager", None)) is not None:
            download_adapters(manager, self._receive_adapters)

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Leave an earlier NCCL group, which may be broken, and join the trainer's new group."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """Expect all weights again; half-loaded layers of an interrupted update return to their old weights."""
        half_loaded = [info for info in map(get_layerwise_info, self.model.modules()) if info.can_load()]
        for info in half_loaded:
            info.loaded_weights.clear()
            info.load_numel = 0
        if half_loaded:
            finalize_layerwise_reload(self.model, self.model_config)
        self._sent = None
        record_packing(self.model, self.model_config.dtype)
        super().start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket: download {url, size, xxh3_128, timeout_s}, or receive any other bucket by NCCL.

        The last call has {digests, dtype, label} instead: the digests of all weights that the trainer has sent.
        """
        if "digests" in update_info:
            self._sent = update_info
            return
        if "url" not in update_info:
            super().update_weights(update_info)
            return
        self.model.load_weights(iter(load(_fetch(update_info)).items()))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Finalize the model, and compare its weights with the digests sent.

        Raises:
            WeightsMismatch: the weights differ.
            ValueError: the trainer sends another precision than the server's, or no digests.
        """
        super().finish_weight_update()
        repack(self.model)
        self._check = self._check or self._new_check()
        if self._sent is None:
            raise ValueError("The trainer sent no digests of its weights.")
        dtype = self._dtype(self._sent["dtype"])
        sent: dict[str, Digest] = {name: tuple(found) for name, found in self._sent["digests"].items()}
        received = model_digests(self.model, dtype, self._check.names(sent))
        # Leave out adapter factors: if the server serves adapters, their memory has earlier adapters, or none yet.
        plain = {name: found for name, found in received.items() if not is_factor(name)}
        self._check.check(sent, self._gather_digests(plain), self._sent["label"])

    def _receive_adapters(self, number: int, path: str) -> None:
        """Download adapters, load them, and compare them and their base with the digests sent.

        Args:
            number: vLLM's number of the adapters.
            path: `adapter_message.address`.

        Raises:
            WeightsMismatch: the base or the adapters differ.
            UserError: vLLM serves no adapters for one of these weights, or the rank exceeds --max-lora-rank.
            ValueError: the trainer sends another precision than the server's.
        """
        message = AdapterMessage.decode(_fetch(parse_address(path)))
        dtype, rank = self._dtype(message.dtype), message.settings["r"]
        if rank > (largest := self.model.lora_manager.lora_config.max_lora_rank):
            raise UserError(
                f"rollout.lora=native: this server allows adapters up to rank {largest} (model.lora.rank={rank}). "
                "Start the server with a larger --max-lora-rank, or set rollout.lora=merged."
            )
        replace_adapters(self.model.lora_manager, number, message.settings, message.tensors, dtype)
        self._check_adapted = self._check_adapted or self._new_check()
        received = model_digests(self.model, dtype, self._check_adapted.names(message.digests))
        self._check_adapted.check(message.digests, self._gather_digests(received), message.label)

    def _new_check(self) -> WeightCheck:
        return weight_check(self.model, exact=self.model_config.quantization is None)

    def _dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the trainer's weights. Raise ValueError if the server has another dtype."""
        dtype: torch.dtype = getattr(torch, name)
        if dtype != self.model_config.dtype:
            raise ValueError(
                f"The weights are {dtype}, and this server was started for {self.model_config.dtype}: start it "
                "with --dtype as in rollout.dtype."
            )
        return dtype

    def _gather_digests(self, digests: dict[str, Digest]) -> list[dict[str, Digest]]:
        group = get_tp_group()
        if group.world_size == 1:
            return [digests]
        return list(map(decode, gather_bytes(encode(digests), group.cpu_group)))


def _fetch(address: dict[str, Any]) -> bytes:
    secret = environment_secret(os.environ)
    return fetch(**address, secret=secret.value if secret else None)
