"""Sends weights from the trainer to the rollout servers, over NCCL or HTTP."""
