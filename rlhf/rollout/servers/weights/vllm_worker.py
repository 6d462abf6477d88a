"""Receives and verifies weights from HTTP or NCCL in a worker of a vLLM server."""

import os
from typing import Any

import torch
from safetensors.torch import load
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlhf.ranks.gloo import gather_bytes
from rlhf.ranks.object_codec import decode, encode
from rlhf.rollout.servers.secret import environment_secret
from rlhf.rollout.servers.weights.pull import fetch
from rlhf.rollout.vllm.model_digests import model_digests, record_packing, weight_check
from rlhf.rollout.vllm.repacking import repack
from rlhf.rollout.weight_digest import Digest, WeightCheck


class ReceivingEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine, which also downloads buckets from a URL and recovers from an interrupted update."""

    _check: WeightCheck | None = None
    _sent: dict[str, Any] | None = None

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
        """Load one bucket: download {url, size, xxh3_128, timeout_s}, or receive any other bucket by NCCL. The last
        call has {digests, dtype, label}: the digests of all weights that the trainer has sent."""
        if "digests" in update_info:
            self._sent = update_info
            return
        if "url" not in update_info:
            super().update_weights(update_info)
            return
        secret = environment_secret(os.environ)
        data = fetch(**update_info, secret=secret.value if secret else None)
        self.model.load_weights(iter(load(data).items()))
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
        if self._check is None:
            self._check = weight_check(self.model, exact=self.model_config.quantization is None)
        if self._sent is None:
            raise ValueError("The trainer sent no digests of its weights.")
        dtype = getattr(torch, self._sent["dtype"])
        if dtype != self.model_config.dtype:
            raise ValueError(
                f"The weights are {dtype}, and this server was started for {self.model_config.dtype}: start it "
                "with --dtype as in rollout.dtype."
            )
        sent: dict[str, Digest] = {name: tuple(found) for name, found in self._sent["digests"].items()}
        received = model_digests(self.model, dtype, self._check.names(sent))
        self._check.check(sent, self._gather_digests(received), self._sent["label"])

    def _gather_digests(self, digests: dict[str, Digest]) -> list[dict[str, Digest]]:
        group = get_tp_group()
        if group.world_size == 1:
            return [digests]
        return list(map(decode, gather_bytes(encode(digests), group.cpu_group)))
