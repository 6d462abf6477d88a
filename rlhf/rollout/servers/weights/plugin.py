"""Plugin of vLLM that registers our way to take over weights; vLLM calls `register` in each of its processes."""

import os

from rlhf.ranks.parent import die_with_parent
from rlhf.storage.scratch import name_shared_memory

BACKEND = "rlhf"
SERVER_PID = "RLHF_ROLLOUT_SERVER_PID"
SCRATCH_NAME = "RLHF_ROLLOUT_SCRATCH"


def register() -> None:
    """Make the backend known, once. What it needs of vLLM is imported when an engine is made.

    vLLM's engine core would outlive a killed server; this is where it learns not to. Workers see to themselves.
    """
    if os.environ.get(SERVER_PID) == str(os.getppid()):
        die_with_parent(SERVER_PID)
    if name := os.environ.get(SCRATCH_NAME):
        name_shared_memory(f"{name}.")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # a second registration is an error there
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rlhf.rollout.servers.weights.vllm_worker", "ReceivingEngine"
        )
