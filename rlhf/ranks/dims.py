"""Arranges the ranks in a grid, and returns the group of ranks that a caller needs.

The grid is [replicate, shard]. Consecutive ranks along `shard` shard one replica of the model. All ranks train on
different samples. A dimension whose ranks share samples (tensor, context, expert) would be a further axis inside
`shard`: `model()` would return a group with this axis, `data()` a group without it, and callers would not change.

Only `rlhf.ranks` gets ranks and groups from torch.distributed.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")

REPLICATE, SHARD = "dp_replicate", "dp_shard"
"""Names of the dimensions of a mesh with several replicas, outermost first."""


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that make collective calls together.

    `members` are global ranks, and `rank` is this rank's index in `members`. `group` is None without torch.distributed,
    and for a group of one rank in a run of several.
    """

    rank: int
    members: Sequence[int]
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.members)

    def of(self, values: Sequence[T]) -> list[T]:
        """Return the members' entries of `values`, which has one entry for each global rank."""
        return [values[member] for member in self.members]


def everyone() -> RankGroup:
    """Return the group of all ranks, which the coordinator, checkpoint files and the stop flag use."""
    if not dist.is_initialized():
        return RankGroup(0, range(1), None)
    return RankGroup(dist.get_rank(), range(dist.get_world_size()), dist.group.WORLD)


def data() -> RankGroup:
    """Return this rank's data-parallel group, the ranks with different samples: so far all ranks."""
    return everyone()


def model(device: torch.device, replicas: int = 1) -> RankGroup:
    """Return the ranks that shard a replica of the model with this rank. Collective with `replicas` > 1.

    If each rank has a whole replica, return a group of this rank alone, without a process group.
    """
    every = everyone()
    if replicas == 1:
        return every
    if replicas == every.size:
        return RankGroup(0, [every.rank], None)
    group = mesh(device, replicas).get_group(SHARD)
    return RankGroup(dist.get_rank(group), dist.get_process_group_ranks(group), group)


def mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """Return the device mesh of all ranks for FSDP2, which all models share. Collective.

    With one replica the mesh has one dimension, otherwise HSDP's [replicas, ranks / replicas]. Consecutive ranks are in
    one replica, so gathers stay within a machine if a replica fits on one.
    """
    if replicas == 1:
        return init_device_mesh(device.type, (dist.get_world_size(),))
    assert dist.group.WORLD is not None
    return _replicated(dist.group.WORLD, device, replicas)


@functools.lru_cache(maxsize=1)
def _replicated(world: dist.ProcessGroup, device: torch.device, replicas: int) -> DeviceMesh:
    grid = torch.arange(world.size()).view(replicas, -1)
    # A mesh would create its groups with torch's default timeout instead of trainer.collective_timeout_s.
    timeout = world._get_backend(device).options._timeout
    sharding, _ = dist.new_subgroups_by_enumeration(grid.tolist(), timeout=timeout)
    replicating, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicating, sharding], device.type, grid, mesh_dim_names=(REPLICATE, SHARD))
