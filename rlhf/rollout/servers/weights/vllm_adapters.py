"""Lets vLLM's own route for adapters download adapters from a trainer instead of reading them from a folder."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from rlhf.rollout.servers.weights.adapter_message import is_address

Receive = Callable[[int, str], None]
"""Function that downloads the adapters at an address, and loads them with vLLM's number."""
_RECEIVE = "_rlhf_receive"


def download_adapters(manager: Any, receive: Receive) -> None:
    """Let `manager` (vLLM's LoRAModelManager) call `receive` for each new adapter whose path is an address.

    `LRUCacheWorkerLoRAManager` loads adapters only from folders, and vLLM's worker gives no access to its instance of
    this class. So this function replaces a method of the class, once per process.
    """
    setattr(manager, _RECEIVE, receive)
    add = LRUCacheWorkerLoRAManager.add_adapter
    if hasattr(add, "__wrapped__"):
        return

    @wraps(add)
    def add_adapter(self: LRUCacheWorkerLoRAManager, lora_request: Any) -> bool:
        number, path = lora_request.lora_int_id, lora_request.lora_path
        received = getattr(self._adapter_manager, _RECEIVE, None)
        if received is not None and is_address(path) and number not in self.list_adapters():
            received(number, path)
        return add(self, lora_request)

    LRUCacheWorkerLoRAManager.add_adapter = add_adapter
