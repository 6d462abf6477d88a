"""Groups the live objects of a run that a checkpoint saves and restores."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.storage.hf_layout import ADAPTER_CONFIG
from rlhf.storage.state import Carried, MovingReference, Stateful, TrainState


@dataclass
class RunState:
    """The live objects that a checkpoint saves and restores.

    `reference` is None unless the reference policy moves: a frozen reference is the starting policy and is not saved.
    `stateful` are the other objects by name; the driver state includes their states.
    """

    roles: Mapping[str, TrainState]
    driver: DriverState
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    reference: MovingReference | None = None
    carried: Carried | None = None
    initial: dict[str, str] = field(init=False)
    """The initial states of `stateful` as JSON, for a rollback to a checkpoint without these states."""

    def __post_init__(self) -> None:
        self.initial = {name: json.dumps(stateful.state_dict()) for name, stateful in self.stateful.items()}

    def copied_bytes(self, contents: Collection[str], hf_adapter: str = "keep") -> int:
        """Return the bytes that this rank copies for an asynchronous save with these settings of `checkpoint`: the live
        tensors that it writes, and its part of a model merged for an export."""
        live = [role.model_shards() for role in self.roles.values() if {"model", "hf_model"} & set(contents)]
        live += [role.optimizer_shards() for role in self.roles.values() if "optimizer" in contents]
        if self.reference is not None:
            live.append(self.reference.shards())
        size = sum(shard.local.nbytes for shards in live for shard in shards.values() if shard.saved_here)
        if "hf_model" in contents and hf_adapter == "merge":
            size += sum(role.merged_bytes() for role in self.roles.values() if ADAPTER_CONFIG in role.hf_files())
        return size
