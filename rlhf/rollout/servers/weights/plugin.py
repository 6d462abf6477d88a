"""vLLM plugin that registers our weight transfer; vLLM calls `register` in each of its processes."""

import os

from rlhf.ranks.parent import die_with_parent
from rlhf.storage.scratch import set_shared_memory_prefix

BACKEND = "rlhf"
SERVER_PID = "RLHF_ROLLOUT_SERVER_PID"
SCRATCH_NAME = "RLHF_ROLLOUT_SCRATCH"


def register() -> None:
    """Register the backend once; its modules are imported when vLLM builds an engine.

    Also make vLLM's engine core die with its server, as vLLM's workers already do.
    """
    if os.environ.get(SERVER_PID) == str(os.getppid()):
        die_with_parent(SERVER_PID)
    if name := os.environ.get(SCRATCH_NAME):
        set_shared_memory_prefix(f"{name}.")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # registering twice raises
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rlhf.rollout.servers.weights.vllm_worker", "ReceivingEngine"
        )
