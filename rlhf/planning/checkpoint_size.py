"""Counts the bytes of a checkpoint on disk, and of the copy in memory for an asynchronous save."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.config import CheckpointConfig
from rlhf.planning.adapter_state import Adapted
from rlhf.planning.model_shapes import ModelShapes
from rlhf.planning.training_state import MOMENTS, WIDTHS, sharded
from rlhf.ranks.memory_folder import SNAPSHOTS


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of one save."""

    by_part: Mapping[str, int]
    """Bytes of all ranks on disk, e.g. `actor/model`, `actor/optimizer`, `actor/huggingface`, `ref`."""
    copied: int
    """Bytes of one rank's copy in memory; 0 if the training waits for saves."""
    max_to_keep: int | None
    """Number of complete saves on disk, besides the one being written; None for all."""
    snapshot: int = 0
    """Bytes of one rank's part of a snapshot in memory; 0 if the run takes none."""
    replicas: int = 0
    """Number of other nodes that also store each part of a snapshot."""

    @property
    def total(self) -> int:
        return sum(self.by_part.values())

    @property
    def published(self) -> int:
        """Bytes on the tmpfs for each rank of a node: its parts of all snapshots, and copies of other nodes' parts.

        Includes the snapshot that is being written.
        """
        return (SNAPSHOTS + 1) * (1 + self.replicas) * self.snapshot


def checkpoint_size(
    roles: Mapping[str, ModelShapes | Adapted], reference: ModelShapes | None, config: CheckpointConfig, ranks: int
) -> CheckpointSize:
    """Return the size of a save of the trained models (without a frozen base) and of a moving reference."""
    contents = set(config.contents)
    parts: dict[str, int] = {}
    copied = snapshot = 0
    for role, model in roles.items():
        shards = 4 * sharded(model.trained if isinstance(model, Adapted) else model.weights, ranks)
        snapshot += (1 + MOMENTS) * shards
        if "model" in contents:
            parts[f"{role}/model"] = 4 * model.count
        if "optimizer" in contents:
            parts[f"{role}/optimizer"] = 4 * MOMENTS * model.count
            copied += MOMENTS * shards
        if "hf_model" in contents:
            written = model.count
            if isinstance(model, Adapted) and config.hf_adapter == "merge":
                written = model.base.count
                copied += 4 * math.ceil(written / ranks)
            parts[f"{role}/huggingface"] = WIDTHS[config.hf_dtype or "float32"] * written
        copied += shards if contents & {"model", "hf_model"} else 0
    if reference is not None:
        snapshot += 4 * sharded(reference.weights, ranks)
        if contents & {"model", "hf_model"}:
            parts["ref"] = 4 * reference.count
            copied += 4 * sharded(reference.weights, ranks)
    kept = config.max_to_keep
    memory = config.memory
    in_memory = (snapshot, memory.replicas) if memory.freq else (0, 0)
    return CheckpointSize(parts, copied if config.async_save else 0, kept, *in_memory)
