"""Dimensions of parallelism: the ranks are a grid, and a caller asks for the group of ranks that it means.

The grid is [replicate, shard]: consecutive ranks hold one copy of the model between them, and the copies are replicas.
All of them train on different samples. A dimension whose ranks work on the same samples (tensor, context, expert)
becomes a further axis of the grid, inside `shard`: `data` then leaves that axis out, and `model` has it. Callers stay
as they are.

Only this package asks torch.distributed for ranks and groups.
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
    """Ranks that act together for one purpose, as one of them sees them.

    `members` are their numbers among all ranks, in order; `rank` is this rank's index in `members`. `group` is their
    process group, None in a process that acts alone.
    """

    rank: int
    members: Sequence[int]
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def of(self, values: Sequence[T]) -> list[T]:
        """Return the members' entries of `values`, which has one for every rank."""
        return [values[member] for member in self.members]


def everyone() -> RankGroup:
    """Return all ranks: what the coordinator, files, and agreements to stop are about."""
    if not dist.is_initialized():
        return RankGroup(0, range(1), None)
    return RankGroup(dist.get_rank(), range(dist.get_world_size()), dist.group.WORLD)


def data() -> RankGroup:
    """Return the ranks that hold different samples, of which this is one: for prompts, balance and sums over tokens.

    These are all ranks, as every rank of replicate and shard has samples of its own.
    """
    return everyone()


def model(device: torch.device, replicas: int = 1) -> RankGroup:
    """Return the ranks that hold one copy of the model together with this one, for gathers. Collective as `mesh`."""
    if replicas == 1:
        return everyone()
    group = mesh(device, replicas).get_group(SHARD)
    return RankGroup(dist.get_rank(group), dist.get_process_group_ranks(group), group)


def mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """Return the mesh of all ranks for FSDP2. Collective.

    With several `replicas` it is HSDP's: [replicas, ranks / replicas], consecutive ranks in one replica, so that
    weights are gathered within a machine where a replica fits on one. Process groups are made once, for all models.
    """
    if replicas == 1:
        return init_device_mesh(device.type, (dist.get_world_size(),))
    assert dist.group.WORLD is not None
    return _replicated(dist.group.WORLD, device, replicas)


@functools.lru_cache(maxsize=1)
def _replicated(world: dist.ProcessGroup, device: torch.device, replicas: int) -> DeviceMesh:
    grid = torch.arange(world.size()).view(replicas, -1)
    # Groups that a mesh makes for itself would wait as long as torch thinks, not trainer.collective_timeout_s.
    timeout = world._get_backend(device).options._timeout
    sharding, _ = dist.new_subgroups_by_enumeration(grid.tolist(), timeout=timeout)
    replicating, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicating, sharding], device.type, grid, mesh_dim_names=(REPLICATE, SHARD))
