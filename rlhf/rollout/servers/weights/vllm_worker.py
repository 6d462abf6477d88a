"""Worker's side of a weight push, inside a vLLM server: takes over weights from HTTP or NCCL."""

import os
from typing import Any

import torch
from safetensors.torch import load
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlhf.rollout.servers.secret import environment_secret
from rlhf.rollout.servers.weights.pull import fetch
from rlhf.rollout.vllm.heads import repack_heads


class ReceivingEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine that can also fetch a bucket from a URL, and start anew after an update that broke off."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's NCCL group; a group from before is left, whatever its state."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """Expect all weights anew. What an update that broke off has left half-loaded goes back to what it was."""
        half_loaded = [info for info in map(get_layerwise_info, self.model.modules()) if info.can_load()]
        for info in half_loaded:
            info.loaded_weights.clear()
            info.load_numel = 0
        if half_loaded:
            finalize_layerwise_reload(self.model, self.model_config)
        super().start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket: {url, size, xxh3_128, timeout_s} is fetched, anything else is for NCCL."""
        if "url" not in update_info:
            super().update_weights(update_info)
            return
        secret = environment_secret(os.environ)
        data = fetch(**update_info, secret=secret.value if secret else None)
        self.model.load_weights(iter(load(data).items()))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """All weights are there: put the model together."""
        super().finish_weight_update()
        repack_heads(self.model)
