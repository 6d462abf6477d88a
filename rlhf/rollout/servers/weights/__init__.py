"""Weights from the trainer to the rollout servers: pushed over NCCL, or lent out over HTTP."""
